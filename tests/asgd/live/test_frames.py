"""Which frames a shard can obey, by its role and by their numbers."""

import math

import pytest

from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.setup import Setup
from asgd.orders.protocol import Rules

WORKERS, SHARDS, JOBS = 3, 2, 9
WORKER_SAYS = {
  frames.HELLO: Frame(frames.HELLO, 2, job=4),
  frames.FETCH: Frame(frames.FETCH, 2, seq=3, job=8),
  frames.PUSH: Frame(frames.PUSH, 2, seq=3, job=8, flag=1, value=0.5),
  frames.DRAIN: Frame(frames.DRAIN, 2),
  frames.BYE: Frame(frames.BYE, 2),
}
FOLLOWER_SAYS = {
  frames.FOLLOW: Frame(frames.FOLLOW, 1, version=7),
  frames.PREPARED: Frame(frames.PREPARED, 2, seq=3, job=1),
  frames.ASKED: Frame(frames.ASKED, 2, seq=3, job=1, version=1, value=0.5),
}
LEAD_SAYS = {
  frames.ROW: Frame(frames.ROW, 2, -1, 4, version=7, flag=3),
  frames.ASK: Frame(frames.ASK, 2, seq=3),
  frames.TOTAL: Frame(frames.TOTAL, 2, seq=3, value=0.5),
}
OF_ALL = frames.HELLO, frames.PUSH, frames.BYE


def fits(frame, shard, consistent):
  setup = Setup(Rules(), WORKERS, JOBS, SHARDS, consistent)
  try:
    frames.check(frame, shard, setup)
  except frames.BadFrame as error:
    assert f"shard {shard} of 2 cannot receive Frame" in str(error)
    return False
  return True


@pytest.mark.parametrize(
  ("shard", "consistent", "kinds"),
  [
    (0, False, (*OF_ALL, frames.DRAIN)),
    (0, True, (*OF_ALL, frames.DRAIN, *FOLLOWER_SAYS)),
    (1, False, (*OF_ALL, frames.FETCH)),
    (1, True, (*OF_ALL, *LEAD_SAYS)),
  ],
)
def test_a_shard_has_use_for_what_its_role_has_a_handler_for(
  shard, consistent, kinds
):
  said = {**WORKER_SAYS, **FOLLOWER_SAYS, **LEAD_SAYS}
  said |= {kind: Frame(kind) for kind in (frames.TICKET, frames.STOP)}
  obeyed = {kind for kind, f in said.items() if fits(f, shard, consistent)}
  assert obeyed == set(kinds)


@pytest.mark.parametrize(
  ("kind", "shard", "consistent"),
  [
    *((kind, 0, True) for kind in (frames.HELLO, frames.DRAIN, frames.PUSH)),
    *((kind, 1, False) for kind in (frames.HELLO, frames.FETCH, frames.BYE)),
    *((kind, 0, True) for kind in FOLLOWER_SAYS),
    *((kind, 1, True) for kind in LEAD_SAYS),
  ],
)
def test_no_number_is_one_that_a_journal_could_not_hold(
  kind, shard, consistent
):
  frame = {**WORKER_SAYS, **FOLLOWER_SAYS, **LEAD_SAYS}[kind]
  assert fits(frame, shard, consistent)
  for field in ("worker", "seq", "job", "version", "flag"):
    for number in (2**31, 2**40, 2**63 - 1, -2, -(2**63)):
      assert not fits(frame._replace(**{field: number}), shard, consistent)


def test_numbers_that_are_of_no_worker_and_no_shard():
  hello, push = WORKER_SAYS[frames.HELLO], WORKER_SAYS[frames.PUSH]
  prepared = FOLLOWER_SAYS[frames.PREPARED]
  assert fits(hello._replace(job=-1), 0, False)
  for frame, shard in (
    (hello._replace(worker=WORKERS), 0),
    (hello._replace(job=-1), 1),  # the lead alone gives numbers
    (push._replace(job=JOBS), 0),
    (push._replace(flag=2), 0),
    (push._replace(value=math.nan), 0),  # and says that it is finite
    (FOLLOWER_SAYS[frames.FOLLOW]._replace(worker=SHARDS), 0),
    (prepared._replace(job=0), 0),
    (prepared._replace(worker=WORKERS), 0),
  ):
    assert not fits(frame, shard, True), frame
  assert fits(push._replace(flag=0, value=math.nan), 0, False)


def test_a_connection_is_that_of_one_worker_or_one_follower():
  said = WORKER_SAYS[frames.HELLO]
  who = frames.sender_of(said)
  assert who == frames.sender_of(WORKER_SAYS[frames.PUSH], who) == ("worker", 2)
  others = said._replace(worker=1), *FOLLOWER_SAYS.values()
  for other in others:
    with pytest.raises(frames.BadFrame, match="one connection sends frames of"):
      frames.sender_of(other, who)
  assert {frames.sender_of(f) for f in FOLLOWER_SAYS.values()} == {("shard", 1)}
