"""Slots never run out, whatever happens."""


from hypothesis import given, settings
from hypothesis import strategies as st
from shard_bench import OPS, WORKERS, Bench, act, audit, one

from asgd.live.setup import Setup
from asgd.orders.protocol import Rules

quick = settings(deadline=None, derandomize=True, max_examples=60)


def test_the_dead_of_a_round_do_not_use_up_the_slots():
  bench = Bench(one(jobs=16, rules=Rules(round=8), log=0), "ssgd", every=8)
  for worker in (0, 1, 2, 0, 1):
    hand = bench.join(worker)
    bench.tick(bench.setup.ladder.start)  # the others do not come
    for _ in range(7):
      hand.push()
    assert bench.received[0] == 0
    audit(bench.lead)
    hand.vanish()
  bench.complete()


def test_a_message_that_is_lost_on_its_way_takes_no_more_than_its_slot():
  bench = Bench(one(jobs=40, rules=Rules(depth=2), log=2))
  first, _ = bench.join(0, 1)
  first.push(lost=True)
  for _ in range(30):
    if first.ready():
      first.push()
    audit(bench.lead)
  assert len(bench.lead.role.dispatcher.open(0)) == 2
  bench.complete()


@st.composite
def runs(draw):
  """Any setup, and anything that may happen."""
  if draw(st.booleans()):
    rules = Rules(round=draw(st.integers(1, 4)), backup=draw(st.integers(0, 2)))
  else:
    bound = draw(st.sampled_from([0, 1, 2, float("inf")]))
    rules = Rules(
      **dict(bound=bound, cache=bound < 9 and draw(st.booleans())),
      depth=draw(st.integers(1, 3)),
    )
    if not rules.cache:
      rules = rules._replace(fetch_every=draw(st.integers(1, 3)))
  setup = Setup(
    *(rules, WORKERS, draw(st.integers(1, 20))),
    log=draw(st.integers(0, 5)),
    owned=draw(st.booleans()) and rules.bound == float("inf"),
  )
  ops = st.tuples(st.sampled_from([*OPS, "kill"]), st.integers(0, 99))
  return setup, draw(st.lists(ops, max_size=40))


@quick
@given(runs())
def test_slots_never_run_out_and_none_is_lost(run):
  setup, ops = run
  bench = Bench(setup, "dana_zero")  # each ticket has a slot of its own
  killed = False
  bench.join()
  for op, number in ops:
    if op == "kill":
      killed = True
      bench.shards[0] = None
      bench.mend()
    else:
      act(bench, op, number)
    audit(bench.lead)
    if bench.lead.stopped:
      break
  bench.finish()
  audit(bench.lead)
  bench.check_once()
  bench.check_replay(some=killed and not setup.log)
