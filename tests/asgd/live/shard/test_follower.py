"""Shards other than the lead: in its order, or in one of their own."""


import numpy as np
import pytest
from kit import bits
from shard_bench import (
  BATCH,
  KINDS,
  OPS,
  PARAMS_AT_FIRST,
  ROOT,
  WORKERS,
  Bench,
  audit,
  crew,
  play,
  team,
)

from asgd import base, sharding
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.orders.protocol import Rules

# Followers that obey the lead.


def said(events):
  """What all shards must agree on, of their journals."""
  return [(*e[:5], e.version, e.totals) for e in events]


def check_team(bench):
  """All obeyed the same rows; together they are one server."""
  first, *others = (journal.events() for journal in bench.journals)
  for events in others:
    assert said(events) == said(first)
  for index, shard in enumerate(bench.shards):
    audit(shard)
    bench.check_once(index)
  bench.check_replay()
  whole, _ = bench.host.run(
    bench.host.init(PARAMS_AT_FIRST, WORKERS),
    *(bench.trace(), len(first)),
    **dict(batch=BATCH, root=ROOT),
  )
  parts = [shard.state.server for shard in bench.shards]
  joined = sharding.join(bench.plan, [state.params for state in parts])
  if bench.setup.totals:  # of parts: rounded otherwise than that of the whole
    np.testing.assert_allclose(joined, whole.server.params, rtol=1e-5)
    assert all(
      len(e.totals) == (e.action == base.RECEIVE)
      for e in bench.journals[0].events()
    )
  else:
    assert bits(joined) == bits(whole.server.params)
  assert {int(state.version) for state in parts} == {int(whole.server.version)}


TEAMS = {
  **KINDS,
  "norm": (Rules(), "dana_zero", dict(clip=1.0)),
  "norm_depth": (Rules(depth=2), "dc_asgd_a", dict(clip=1.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kind", "shards"),
  [*((kind, 2) for kind in TEAMS), ("cache", 3), ("norm", 3)],
)
def test_followers_do_what_the_lead_does(kind, shards):
  rules, name, options = TEAMS[kind]
  setup = team(24, rules, shards, log=3, totals="clip" in options)
  bench = Bench(setup, name, **options)
  for _ in play(bench, seed=5):
    pass
  bench.finish()
  check_team(bench)


def test_a_message_counts_when_every_shard_has_its_part():
  bench = Bench(team(shards=3))
  hand = bench.join(0)
  hand.push(only=0)
  assert bench.received == [0, 0, 0]
  for shard, received in ((2, 0), (1, 1)):
    hand.tell(shard, hand.unacked[shard][0])
    bench.settle()
    assert bench.received == [received] * 3
  # And if the lead is the last to have it.
  pushes = hand.work(1)
  for shard, received in ((1, 1), (2, 1), (0, 2)):
    hand.tell(shard, pushes[shard])
    bench.settle()
    assert bench.received == [received] * 3


def test_what_is_prepared_twice_counts_once():
  bench = Bench(team(shards=3))
  hand = bench.join(0)
  pushes = hand.work(0)
  for shard in (0, 1, 1):
    hand.tell(shard, pushes[shard])
    bench.settle()
  bench.follow(1)  # tells all that it has once more
  bench.settle()
  assert bench.received[0] == 0
  hand.tell(2, pushes[2])
  bench.settle()
  assert bench.received[0] == 1


def test_a_message_that_one_shard_missed_is_said_again():
  bench = Bench(team(shards=2))
  hand = bench.join(0)
  hand.push(only=1)
  assert bench.received[0] == 0
  hand.again()
  assert bench.received == [1, 1]
  bench.finish()
  check_team(bench)


def test_a_follower_that_asks_twice_obeys_once():
  """As it comes back while the lead does: both open the way between them."""
  bench = Bench(team(shards=2))
  bench.join(0)
  bench.hands[0].push()
  bench.shards[1] = None
  bench.join(1)  # which it does not hear of
  bench.start_shard(1)
  bench.follow(1)
  bench.settle()
  assert said(bench.journals[1].events()) == said(bench.journals[0].events())
  bench.finish()
  check_team(bench)


def test_a_message_that_is_not_finite_is_refused_by_all():
  bench = Bench(team(jobs=6, rules=Rules(depth=2)))
  hand = bench.join(0)
  hand.push(finite=False)
  for index in (0, 1):
    assert bench.rows(index, start=3) == [
      *("reject 0:0", "lost 0:1", "leave 0:0"),
    ]
  bench.finish()
  check_team(bench)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["cache", "round", "norm_depth"])
def test_one_of_a_team_may_be_killed_at_any_entry(kind, index):
  rules, name, options = TEAMS[kind]
  setup = team(8, rules, log=3, totals="clip" in options)
  bench = Bench(setup, name, **options)
  for _ in play(bench, seed=6, steps=16):
    pass
  bench.finish()
  events = bench.journals[index].events()
  for kill_at in range(1, len(events) + 1):
    bench = Bench(setup, name, **options)
    bench.journals[index].kill_at = kill_at
    for _ in play(bench, seed=6, steps=16):
      bench.mend()
    bench.finish()
    assert bench.journals[index].kill_at is None
    check_team(bench)


# Followers with an order of their own.


CALM = tuple(op for op in OPS if op != "lost")


@pytest.mark.parametrize(
  ("kind", "shards"), [("asynchronous", 2), ("fetch_every", 2), ("cache", 3)]
)
def test_shards_of_their_own_mind_replay_to_the_same_bits(kind, shards):
  rules, name, options = KINDS[kind]
  bench = Bench(crew(24, rules, shards, log=3), name, **options)
  for _ in play(bench, seed=7, ops=CALM):
    pass
  bench.finish()
  for index, shard in enumerate(bench.shards):
    audit(shard)
    bench.check_once(index)
  bench.check_replay()


def test_a_follower_takes_messages_in_the_order_in_which_they_come():
  bench = Bench(crew())
  first, second = bench.join(0, 1)
  for shard, order in ((1, (first, second)), (0, (second, first))):
    for hand in order:
      if shard:
        hand.push(only=1)
      else:
        hand.tell(0, hand.unacked[0][0])
  bench.settle()
  received = [
    [text for text in bench.rows(index) if text.startswith("receive")]
    for index in (0, 1)
  ]
  assert received == [
    ["receive 1:1", "receive 0:0"],
    ["receive 0:0", "receive 1:1"],
  ]
  bench.complete()


@pytest.mark.slow
@pytest.mark.parametrize("log", [0, 3])
@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_of_its_own_mind_may_be_killed_at_any_entry(index, log):
  setup = crew(8, log=log)
  bench = Bench(setup, "dana_zero")
  for _ in play(bench, seed=8, steps=16, ops=CALM):
    pass
  bench.finish()
  events = bench.journals[index].events()
  for kill_at in range(1, len(events) + 1):
    bench = Bench(setup, "dana_zero")
    bench.journals[index].kill_at = kill_at
    for _ in play(bench, seed=8, steps=16, ops=CALM):
      bench.mend()
    bench.finish()
    assert bench.journals[index].kill_at is None
    for other, shard in enumerate(bench.shards):
      audit(shard)
      bench.check_once(other)
    bench.check_replay(some=not log)


def test_a_follower_says_who_leaves():
  bench = Bench(crew())
  hand = bench.join(0)
  hand.vanish()
  bench.join(0)
  bench.hands[0].push()
  bench.hands[0].send(frames.DRAIN)
  bench.hands[0].push()
  bench.hands[0].bye()
  for index in (0, 1):
    leaves = [text for text in bench.rows(index) if "leave" in text]
    assert leaves == ["leave 0:0", "leave 0:1"]


def test_a_message_that_only_a_follower_received_is_replayed():
  """Its worker died before the lead had it: the lead lost the job, which is
  done again, and the follower receives it twice."""
  bench = Bench(crew(jobs=4))
  first, second = bench.join(0, 1)
  first.push(only=1)
  assert bench.rows(1)[-1] == "receive 0:0"
  first.vanish()
  assert bench.rows(0)[-2:] == ["lost 0:0", "leave 0:0"]
  bench.complete()


def test_what_a_refused_worker_hands_in_is_not_received():
  """With two tickets, a worker hands in the second before it hears that the
  first was refused."""
  bench = Bench(crew(jobs=6, rules=Rules(depth=2)))
  hand = bench.join(0)
  first, second = hand.work(0), hand.work(1)
  for shard in (1, 0):
    hand.tell(shard, first[shard]._replace(flag=0))
  for shard in (1, 0):
    hand.tell(shard, second[shard])
  bench.settle()
  assert bench.rows(0)[-3:] == ["reject 0:0", "lost 0:1", "leave 0:0"]
  bench.finish()
  for index in (0, 1):
    bench.check_once(index)
  bench.check_replay()


def test_a_holder_from_before_does_not_drive_out_its_successor():
  for setup in (crew(), team()):
    bench = Bench(setup)
    zombie = bench.join(0)
    bench.lead.expel(0, 1.0)
    holder = bench.join(0)
    holder.listen()
    zombie.ways[1] = zombie._way(1)  # it was cut off, and connects anew
    zombie.tell(1, Frame(frames.HELLO, 0, job=0))
    assert not any("expel" in text for text in holder.listen())
    assert zombie.listen()[-1] == "expel 1"
    bench.finish()
    bench.check_once(1)
    bench.check_replay()
