"""What the benchmark of slow links measures and simulates."""

import numpy as np
import pytest

from asgd.experiment import predict
from launch.bench import namespaces, network
from launch.bench.network import LinkSpeeds

# A job of 1, half a unit each way, and a port that a message of 1,024 float32
# keeps for a quarter of one.
LINKS = LinkSpeeds(job=1.0, latency=0.5, port=16_384.0, nbytes=4096)
EXACT = {"rel": 1e-6}  # of a file, whose times have so many digits


def test_workers_that_do_not_meet_are_as_many_times_as_fast():
  alone = network.simulated(LINKS, 1, 1, 8, [1.0])
  assert alone == pytest.approx(1 / (1 + 2 * (0.5 + 0.25)), **EXACT)
  assert LINKS.bound(1, 1) == pytest.approx(alone, **EXACT)
  two = network.simulated(LINKS, 1, 2, 8, [1.0])
  assert two == pytest.approx(1 / (1 + 2 * (0.5 + 0.125)), **EXACT)


def test_two_tickets_of_one_port_by_hand():
  """Both tickets are granted at 0: the second leaves the port after the first,
  a quarter later, and stays as far behind, so that nobody waits again."""
  config = {"network": LINKS.section(), "durations": {"name": "constant"}}
  records, _ = network._train(LINKS, "simulate", 2, 1, 6, **config)
  first = np.array([2.5, 5.0, 7.5])
  expected = np.sort(np.concatenate([first, first + 0.25]))
  np.testing.assert_allclose(records.time, expected, rtol=1e-12)


def test_beyond_the_bend_a_port_lets_no_more_through():
  assert LINKS.bound(16, 1) == 1 / 0.25
  rate = network.simulated(LINKS, 16, 1, 64, [1.0])
  assert rate == pytest.approx(1 / 0.25, **EXACT)


def test_slower_links_change_the_unit_of_time_alone():
  slow = LINKS.slower(3.0)
  assert slow.bound(4, 2) == pytest.approx(LINKS.bound(4, 2) / 3)


def test_what_one_worker_took_is_what_it_waited_and_more():
  runtime = network.Threads(0.2)
  times, late = runtime.measured(4)
  problem = network.waiting(1, seconds=0.0)
  assert problem.batches(0, 1)(0, 0).shape == (1, 1)
  assert len(times) == 3  # without the first
  assert min(times) > 0.5 * runtime.links.job
  assert late > 0


def test_live_workers_over_slow_links_hand_in_all_messages():
  runtime = network.Threads(0.2)
  rate, late = runtime.rate(2, 2, 8)
  assert rate > 0
  assert late > 0


def test_disturbed_measurements_are_repeated():
  tries = iter([("a", 0.5), ("b", 0.2), ("c", 0.0)])
  assert network.undisturbed(lambda: next(tries)) == ("b", 0.2)
  tries = iter([("a", 0.01), ("b", 0.0)])
  assert network.undisturbed(lambda: next(tries)) == ("a", 0.01)


def test_workers_that_share_times_do_not_keep_step():
  rows = predict.shifted_durations([[1.0, 2.0, 3.0], [7.0]], 4)
  assert rows == [[1.0, 2.0, 3.0], [7.0], [2.0, 3.0, 1.0], [7.0]]
  assert predict.shifted_durations(rows, 4) == rows


# Network namespaces: their commands and errors.


@pytest.fixture
def faked(monkeypatch):
  """Replaces commands: (list of those that are called, their outputs)."""
  commands, answers = [], {"show": ""}

  def run(*words):
    commands.append(" ".join(words))
    return next((v for k, v in answers.items() if k in words), "")

  monkeypatch.setattr(namespaces, "_run", run)
  return commands, answers


def test_both_ends_of_a_wire_have_a_bandwidth(faked):
  commands, answers = faked
  wire = namespaces.VirtualWire(7)
  beyond = "nsenter --net=/proc/7/ns/net"
  assert commands[1] == "ip link add near type veth peer name far netns 7"
  assert f"{beyond} ip address add 10.211.0.2/24 dev far" in commands
  commands.clear()
  wire.limit(5e6)
  limit = "root tbf rate 40000000bit burst 10000 latency 50ms"
  assert commands[1::2] == [
    f"tc qdisc add dev near {limit}",
    f"{beyond} tc qdisc add dev far {limit}",
  ]
  answers["show"] = "qdisc tbf 8002: root rate 40Mbit"
  commands.clear()
  wire.limit(None)
  assert commands[1::2] == [
    "tc qdisc del dev near root",
    f"{beyond} tc qdisc del dev far root",
  ]


def test_the_network_of_a_machine_is_left_alone(faked):
  _, answers = faked
  answers["link"] = '[{"ifname": "lo"}, {"ifname": "eth0"}]'
  with pytest.raises(ValueError, match="it has eth0.* unshare --net COMMAND"):
    next(iter(namespaces.wire().gen))


def test_a_new_namespace_may_have_devices_of_tunnels(faked):
  _, answers = faked
  answers["link"] = '[{"ifname": "lo"}, {"ifname": "sit0"}]'
  namespaces._check_namespace()


def test_a_command_that_fails_is_named():
  with pytest.raises(ValueError, match="false x failed .it does not say why."):
    namespaces._run("false", "x")
  with pytest.raises(ValueError, match="nosuch cannot be run .*: it needs"):
    namespaces._run("nosuch")


