"""Engines whose runs are of several protocols, which know how they are run."""

from collections.abc import Iterator, Mapping
from typing import Any

from asgd.experiment import protocol, refusals
from asgd.experiment.engines import Context, Engine, EngineKind
from asgd.experiment.schema import Run


def engine_kind(
  name: str, *, sections: Mapping[str, Any], **fields: Any
) -> EngineKind:
  """Returns an engine that leaves its runs to the runners of their protocols.

  Args:
    name: of the engine, by which protocols have their runners.
    sections: of a config, its own.
    fields: further ones of the EngineKind.
  """

  def runner(run: Run) -> protocol.Runner:
    return protocol.of(run).runners[name]

  def check(run: Run) -> None:
    runner(run).check(run)
    refusals.check(run, protocol.of(run), name, sections)

  def plan(experiment: Any, run: Run, workers: int) -> Any:
    return runner(run).plan(experiment, run, workers)

  def start(context: Context) -> Engine:
    return runner(context.plan.run).start(context)

  def programs(
    experiment: Any, run: Run, workers: int, target: Any
  ) -> Iterator[Any]:
    make = runner(run).programs
    if make is None:
      every = protocol.of(run).runners.items()
      able = [f"engine={other}" for other, each in every if each.programs]
      remedy = f"use {' or '.join(able)}" if able else "use another recipe"
      raise ValueError(
        f"config.runs.{run.label}: engine {name!r} has no program that could"
        f" be compiled ahead: {remedy}"
      )
    return make(experiment, run, workers, target)

  def describe(result: Mapping[str, Any]) -> str:
    return protocol.of_result(result).runners[name].describe(result)

  def protocols() -> list[str]:
    known = protocol.PROTOCOLS.values()
    return [each.name for each in known if name in each.runners]

  return EngineKind(
    sections=sections,
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
