"""The graph of a network: the costs of its nodes, and the edges between them.

A partitioner reads a `Graph` and nothing else. A chain of layers is the common
case. A skip connection, or an input that later nodes read too (an attention
mask), is one more edge; parameters that several nodes use are a `Tie`.
`profile` makes the graph of a model.

Index letters in shape comments, here and in the partitioners:
  N  nodes, numbered in an order in which they can run
  S  stages, numbered along the network
  D  devices
"""

import statistics
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks, models
from asgd.parallel import memory


class Node(NamedTuple):
  """A part of the network that is not cut inside; times are of a microbatch."""

  name: str  # unique; slashes make scopes: block3/conv1
  forward: float = 0.0  # seconds
  backward: float = 0.0  # seconds, of inputs and weights
  activation: float = 0.0  # bytes of the output
  parameters: float = 0.0  # bytes
  stash: float = 0.0  # bytes kept for one microbatch's backward
  kind: str = ""  # blocks that are alike have the same kind

  def work(self, recompute: bool = False) -> float:
    """Returns the seconds of a microbatch; `recompute` adds a forward."""
    return (2 if recompute else 1) * self.forward + self.backward


class Edge(NamedTuple):
  """A tensor that one node makes and another one needs. Edges of one source are
  the same tensor, or parts of it: it is sent once to each stage that needs it,
  at the size of the largest such edge."""

  source: int
  target: int
  bytes: float
  cut: bool = True  # False: both ends must be in one stage


class Tie(NamedTuple):
  """Parameters that several nodes share; each node's bytes include them."""

  nodes: tuple[int, ...]
  bytes: float


class Graph(NamedTuple):
  """A network."""

  nodes: tuple[Node, ...]  # in an order in which they can run
  edges: tuple[Edge, ...]
  tied: tuple[Tie, ...]


def make(
  nodes: Iterable[Node],
  edges: Iterable[tuple[Any, ...]] = (),
  tied: Iterable[tuple[Iterable[int | str], float]] = (),
) -> Graph:
  """Checks nodes, edges and ties, and returns their Graph.

  Args:
    nodes: in an order in which they can run.
    edges: Edges or (source, target), numbers or names; a third entry is the
      bytes sent (None: all of the source's activation), a fourth whether the
      edge may be cut.
    tied: (nodes, bytes) for each group of nodes with common parameters.

  Example:
    >>> g = make([Node("a", activation=8), Node("b")], [("a", "b")])
    >>> g.edges
    (Edge(source=0, target=1, bytes=8, cut=True),)
  """
  nodes = tuple(nodes)
  if not nodes:
    raise ValueError("a graph needs a node or more, not none")
  index_of: dict[str, int] = {}
  for i, node in enumerate(nodes):
    if node.name in index_of:
      raise ValueError(
        f"nodes {index_of[node.name]} and {i} are both called {node.name!r};"
        " number them"
      )
    index_of[node.name] = i
    for field in Node._fields[1:-1]:
      checks.nonnegative(f"{field} of node {node.name!r}", getattr(node, field))

  def node_index(end: int | str) -> int:
    if isinstance(end, str):
      if end not in index_of:
        raise ValueError(f"no node is called {end!r}")
      return index_of[end]
    if not 0 <= end < len(nodes):
      raise ValueError(f"no node has number {end}; there are {len(nodes)}")
    return int(end)

  by_ends = {}
  for edge in edges:
    # A missing third or fourth entry is None or True.
    missing: list[Any] = [None, True][len(edge) - 2 :]
    first_node, second_node, size, cut = *edge, *missing
    source, target = node_index(first_node), node_index(second_node)
    between = f"{nodes[source].name!r} to {nodes[target].name!r}"
    if source >= target:
      raise ValueError(
        f"the edge from {between} goes back; list nodes in an order in which"
        " they can run"
      )
    if (source, target) in by_ends:
      raise ValueError(f"the edge from {between} is given twice; add them up")
    size = nodes[source].activation if size is None else size
    checks.nonnegative(f"bytes from {between}", size)
    by_ends[source, target] = Edge(source, target, size, bool(cut))
  ties = []
  for tied_nodes, size in tied:
    members = tuple(sorted({node_index(i) for i in tied_nodes}))
    if len(members) < 2:
      raise ValueError(f"a tie needs two nodes or more, not {members}")
    checks.nonnegative(f"bytes of the tie {members}", size)
    smallest = min(nodes[i].parameters for i in members)
    if size > smallest:
      raise ValueError(
        f"nodes {members} cannot share {size} bytes: one of them has {smallest}"
        " bytes of parameters"
      )
    ties.append(Tie(members, size))
  sorted_edges = tuple(by_ends[ends] for ends in sorted(by_ends))
  return Graph(nodes, sorted_edges, tuple(ties))


def chain(nodes: Iterable[Node]) -> Graph:
  """Returns the graph in which each node needs the one before."""
  nodes = tuple(nodes)
  return make(nodes, [(i, i + 1) for i in range(len(nodes) - 1)])


def parameters(graph: Graph, nodes: Collection[int]) -> float:
  """Returns the bytes of the parameters of some nodes. Shared parameters count
  once."""
  total = sum(graph.nodes[i].parameters for i in nodes)
  for tie in graph.tied:
    members = sum(i in nodes for i in tie.nodes)
    total -= max(members - 1, 0) * tie.bytes
  return total


def bytes_of(tensors: Iterable[tuple[Hashable, float]]) -> float:
  """Returns the bytes of a list of (tensor, bytes). A tensor that occurs
  several times counts once, with its largest size."""
  return sum(_largest(tensors).values())


def sent(graph: Graph, stage: Sequence[int]) -> dict[tuple[int, int], float]:
  """Returns (source node, receiving stage) -> bytes, for a stage per node."""
  return _largest(
    ((source, stage[target]), size)
    for source, target, size, _ in graph.edges
    if stage[source] != stage[target]
  )


def _largest(tensors: Iterable[tuple[Any, float]]) -> dict[Any, float]:
  """Returns tensor -> the most bytes that it is listed with."""
  sizes: dict[Any, float] = {}
  for tensor, size in tensors:
    sizes[tensor] = max(sizes.get(tensor, 0.0), size)
  return sizes


def neighbours(graph: Graph) -> tuple[list[set[int]], list[set[int]]]:
  """Returns the successors and the predecessors of each node."""
  successors: list[set[int]] = [set() for _ in graph.nodes]
  predecessors: list[set[int]] = [set() for _ in graph.nodes]
  for edge in graph.edges:
    successors[edge.source].add(edge.target)
    predecessors[edge.target].add(edge.source)
  return successors, predecessors


def measure(
  run: Callable[[], object], *, clock: Callable[[], float], repeats: int = 5
) -> float:
  """Returns the median time of `run`, which starts a computation and returns
  its results, in seconds of `clock`. A first run, which compiles, is left
  out."""
  checks.integer("repeats", repeats)

  def time_once():
    start = clock()
    jax.block_until_ready(run())
    return clock() - start

  jax.block_until_ready(run())
  return statistics.median(time_once() for _ in range(repeats))


def profile(
  layers: models.Layers,
  params: optax.Params,
  example: Any,
  *,
  measure: Callable[[Callable[[], object]], float] | None = None,
  seconds: Sequence[tuple[float, float]] | None = None,
  flops: float = 1e13,
  bandwidth: float = 1e12,
  key: jax.Array | None = None,
) -> Graph:
  """Returns the chain of a model's layers, in training; the class of a layer is
  its kind.

  Bytes follow from shapes: `params`, and `example`, a microbatch, may be
  jax.ShapeDtypeStructs. A layer's stash are the residuals that JAX stores for
  its backward, without parameters; XLA may recompute some. The first layer's
  backward is of its weights only. Layers that are alike are compiled once.

  Args:
    measure: times a computation, such as `partial(graph.measure,
      clock=time.perf_counter)`. The backward's time is that of forward and
      backward together minus the forward's, at least 0. None takes XLA's counts
      of the compiled programs, and the larger of operations / `flops` and
      bytes / `bandwidth` (the roofline).
    seconds: measured (forward, backward) of each layer; nothing is compiled.
    flops: assumed operations per second of a device.
    bandwidth: assumed bytes per second of a device's memory.
    key: for layers that draw "dropout".
  """
  checks.positive("flops", flops)
  checks.positive("bandwidth", bandwidth)
  weights: Any = base.weights_of(params)
  if len(weights) != len(layers):
    raise ValueError(
      f"{len(layers)} layers need a dict of parameters each, not {len(weights)}"
    )
  stats: Any = params.stats if isinstance(params, base.Variables) else None
  dtype = jax.dtypes.canonicalize_dtype(example.dtype)  # NumPy's float64
  if measure is None:
    x: Any = jax.ShapeDtypeStruct(example.shape, dtype)
  else:
    x = _array(example).astype(dtype)

  def seconds_of(program, *args):
    if measure is not None:
      return measure(partial(program, *jax.tree.map(_array, args)))
    counts = program.cost_analysis() or {}
    return max(
      max(counts.get("flops", 0.0), 0.0) / flops,
      max(counts.get("bytes accessed", 0.0), 0.0) / bandwidth,
    )

  costs, nodes = {}, []
  for i, layer in enumerate(layers):
    args = weights[i], stats and stats[i], x
    if measure is not None:
      args = jax.tree.map(_array, args)
    forward, vjp, forward_and_backward = _calls(layer, i, key)
    output = jax.eval_shape(forward, *args)
    shapes = jax.tree.map(lambda a: (a.shape, str(a.dtype)), args)
    cost_key = repr((layer, shapes, i == 0))
    # Layers with equal shapes and settings are measured once.
    if cost_key not in costs:
      sizes = {
        "activation": memory.bytes_of(output),
        "parameters": memory.bytes_of(weights[i]),
        "stash": _stash(vjp, args),
      }
      times = 0.0, 0.0
      if seconds is None:
        forward = jax.jit(forward).lower(*args).compile()
        forward_and_backward = (
          jax.jit(forward_and_backward).lower(*args, output).compile()
        )
        forward_seconds = seconds_of(forward, *args)
        # The combined program runs the forward, too.
        both_seconds = seconds_of(forward_and_backward, *args, output)
        backward_seconds = max(both_seconds - forward_seconds, 0.0)
        times = forward_seconds, backward_seconds
      node = Node("", *times, **sizes, kind=type(layer).__name__)
      costs[cost_key] = node, forward
    node, forward = costs[cost_key]
    if seconds is not None:
      node = node._replace(forward=seconds[i][0], backward=seconds[i][1])
    nodes.append(node._replace(name=f"{node.kind}_{i}"))
    x = output if measure is None else forward(*args)
  return chain(nodes)


def _calls(
  layer: Any, index: int, key: jax.Array | None
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
  """Returns three functions of a layer: its forward, its vjp, and its forward
  and backward together."""

  def forward(weights, stats, x):
    params: Any = (weights,)
    if stats is not None:
      params = base.Variables(params, (stats,))
    y, _ = models.apply((layer,), params, x, train=True, key=key, first=index)
    return y

  def vjp(weights, stats, x):
    if index:
      return jax.vjp(lambda w, x: forward(w, stats, x), weights, x)
    # Inputs of the network need no gradient, and may be whole numbers.
    return jax.vjp(lambda w: forward(w, stats, x), weights)

  def forward_and_backward(weights, stats, x, gradient):
    y, pullback = vjp(weights, stats, x)
    return y, pullback(gradient)

  return forward, vjp, forward_and_backward


def _stash(vjp: Callable[..., Any], args: tuple[Any, ...]) -> int:
  """Returns the bytes that the backward reads, without parameters."""
  backward = jax.make_jaxpr(lambda *args: jax.tree.leaves(vjp(*args)[1]))
  program = backward(*args).jaxpr
  # Parameters are held in any case: only other residuals take memory.
  inputs = set(map(id, program.invars[: len(jax.tree.leaves(args[:2]))]))
  residuals = {id(v): v.aval for v in program.outvars if id(v) not in inputs}
  return memory.bytes_of(list(residuals.values()))


def _array(leaf: Any) -> jax.Array:
  """Returns a leaf as an array; for a shape, an array of 0.5 or of 0."""
  if not isinstance(leaf, jax.ShapeDtypeStruct):
    return jnp.asarray(leaf)
  # Not zeros: some hardware is faster with zeros.
  is_real = jnp.issubdtype(leaf.dtype, jnp.inexact)
  return jnp.full(leaf.shape, 0.5 if is_real else 0, leaf.dtype)
