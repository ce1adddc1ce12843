"""Engines for several protocols: each protocol has a Runner for each engine."""

from collections.abc import Iterator, Mapping
from typing import Any

from asgd.experiment import protocol, refusals
from asgd.experiment.engines import Context, Engine, EngineKind
from asgd.experiment.schema import Run


def engine_kind(
  name: str, *, sections: Mapping[str, Any], **fields: Any
) -> EngineKind:
  """Returns an engine that delegates each run to the Runner of its protocol.

  Args:
    name: the name of the engine, the key of its Runner in `Protocol.runners`.
    sections: the engine's sections of a config.
    fields: further fields of the EngineKind.
  """

  # A protocol has one Runner for each engine that can execute it.
  def runner(run: Run) -> protocol.Runner:
    return protocol.of(run).runners[name]

  def check(run: Run) -> None:
    runner(run).check(run)
    # The runner first: it knows the recipe's own errors.
    refusals.check(run, protocol.of(run), name, sections)

  def plan(experiment: Any, run: Run, workers: int) -> Any:
    return runner(run).plan(experiment, run, workers)

  def start(context: Context) -> Engine:
    return runner(context.plan.run).start(context)

  def programs(
    experiment: Any, run: Run, workers: int, target: Any
  ) -> Iterator[Any]:
    """Returns the programs of a run; ValueError if its runner has none."""
    make_programs = runner(run).programs
    if make_programs is None:
      runners = protocol.of(run).runners.items()
      names = [f"engine={key}" for key, value in runners if value.programs]
      remedy = f"use {' or '.join(names)}" if names else "use another recipe"
      raise ValueError(
        f"config.runs.{run.label}: engine {name!r} has no program that could"
        f" be compiled ahead: {remedy}"
      )
    return make_programs(experiment, run, workers, target)

  # A row of results has no Run: its recipe or a column names the protocol.
  def describe(result: Mapping[str, Any]) -> str:
    return protocol.of_result(result).runners[name].describe(result)

  def protocols() -> list[str]:
    all_protocols = protocol.PROTOCOLS.values()
    return [value.name for value in all_protocols if name in value.runners]

  return EngineKind(
    sections=sections,
    # Lambdas look the runner up for each run: one engine serves several
    # protocols.
    workers=lambda run: runner(run).workers(run),
    check=check,
    devices=lambda run: runner(run).devices(run),
    plan=plan,
    start=start,
    describe=describe,
    programs=programs,
    protocols=protocols,
    **fields,
  )
