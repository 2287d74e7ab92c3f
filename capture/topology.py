"""The shape of a recording without addresses: nodes, edges, text forms, and the difference between two of them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from graphlib import TopologicalSorter
from typing import Any, Protocol

from graphrt.checks import fail

# Facts that list the tensors of a node.
_TENSORS = ("inputs", "outputs")


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One launch, copy, fill or allocation.

    type   kernel, memcpy, memset, mem_alloc, mem_free, ... as CUDA has them; launch on a CPU tape
    name   kernel, operator or entry point; for a copy its direction
    stage  the entry point of graphrt that made the node, if one did
    facts  what else is stable from run to run: grid and block, bytes, shapes
    """

    type: str
    name: str
    stage: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Stage and kernel, for a reader."""
        return f"{self.stage}: {self.name}" if self.stage and self.stage != self.name else self.name

    @property
    def signature(self) -> str:
        """Equal for nodes that do the same, on whatever memory."""
        forms = [{**t, "memory": None} for t in self._tensors]
        others = {key: value for key, value in self.facts.items() if key not in _TENSORS}
        return json.dumps([self.type, self.name, self.stage, others, forms], sort_keys=True, default=str)

    @property
    def memory(self) -> list[int]:
        """The number of the memory of each tensor, where the recording numbers them."""
        return [t["memory"] for t in self._tensors]

    @property
    def _tensors(self) -> list[Mapping[str, Any]]:
        return [t for key in _TENSORS for t in self.facts.get(key, ())]


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """`target` waits for `source`; programmatic: for its trigger (PDL) only, and then on the device for its end."""

    source: int
    target: int
    programmatic: bool = False


@dataclass(frozen=True)
class Topology:
    """Nodes in the order in which they were recorded, and the edges between their positions."""

    name: str
    device: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[Edge, ...]

    @cached_property
    def _depths(self) -> list[int]:
        """Nodes on the longest chain that ends in each node."""
        sources: dict[int, list[int]] = {i: [] for i in range(len(self.nodes))}
        for edge in self.edges:
            sources[edge.target].append(edge.source)
        depths = [0] * len(self.nodes)
        for i in TopologicalSorter(sources).static_order():
            depths[i] = 1 + max((depths[s] for s in sources[i]), default=0)
        return depths

    @property
    def longest_chain(self) -> int:
        """Nodes that must run one after the other: with launch gaps, the least time of a replay."""
        return max(self._depths, default=0)

    @property
    def num_branches(self) -> int:
        """Most nodes at one depth: how many CUDA may run side by side."""
        return max((self._depths.count(d) for d in set(self._depths)), default=0)

    def programmatic(self) -> list[tuple[str, str]]:
        """(source, target) names of the edges that wait for a trigger only."""
        return [(self.nodes[e.source].name, self.nodes[e.target].name) for e in self.edges if e.programmatic]

    def counts(self) -> dict[str, int]:
        """How many nodes of each type."""
        types = [node.type for node in self.nodes]
        return {kind: types.count(kind) for kind in sorted(set(types))}

    def as_dict(self) -> dict[str, Any]:
        """For JSON. The same program gives the same value, run after run."""
        return {
            "name": self.name,
            "device": self.device,
            "num_nodes": len(self.nodes),
            "longest_chain": self.longest_chain,
            "branches": self.num_branches,
            "nodes": [
                {"index": i, "type": n.type, "name": n.name, **({"stage": n.stage} if n.stage else {}), **n.facts}
                for i, n in enumerate(self.nodes)
            ],
            "edges": [
                {"from": e.source, "to": e.target, **({"programmatic": True} if e.programmatic else {})}
                for e in self.edges
            ],
        }

    def dot(self) -> str:
        """For Graphviz. Programmatic edges are dashed, nodes that are no launches are boxes."""
        lines = [f'  n{i} [label="{_quoted(n.title)}"{_shape(n)}];' for i, n in enumerate(self.nodes)]
        lines += [
            f"  n{e.source} -> n{e.target}{' [style=dashed]' if e.programmatic else ''};" for e in sorted(self.edges)
        ]
        return "digraph recording {\n" + "\n".join(lines) + "\n}\n"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _shape(node: GraphNode) -> str:
    return "" if node.type in ("kernel", "launch") else ", shape=box"


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """What `b` has and `a` has not, and the other way round. False if the two are alike.

    Nodes are matched in order; one that does the same on other memory is removed and added. An edge counts as removed
    or added only between nodes that both have.
    """

    a: str
    b: str
    nodes_added: tuple[str, ...]
    nodes_removed: tuple[str, ...]
    edges_added: tuple[str, ...]
    edges_removed: tuple[str, ...]

    def __bool__(self) -> bool:
        return any((self.nodes_added, self.nodes_removed, self.edges_added, self.edges_removed))

    def __str__(self) -> str:
        if not self:
            return f"{self.a!r} and {self.b!r} are alike"
        parts = [
            ("+ node", self.nodes_added),
            ("- node", self.nodes_removed),
            ("+ edge", self.edges_added),
            ("- edge", self.edges_removed),
        ]
        lines = [f"{sign} {text}" for sign, texts in parts for text in texts]
        return f"from {self.a!r} to {self.b!r}:\n" + "\n".join(lines)


class HasTopology(Protocol):
    """A Recording."""

    def topology(self) -> Topology: ...


def diff(a: Topology | HasTopology, b: Topology | HasTopology) -> GraphDiff:
    """What changed from recording (or topology) `a` to `b`: nodes and edges, in words."""
    for name, value in (("a", a), ("b", b)):
        if not hasattr(value, "topology") and not isinstance(value, Topology):
            fail(name, "a Recording or a Topology", type(value).__name__)
    old, new = (x if isinstance(x, Topology) else x.topology() for x in (a, b))
    before, after = ([node.signature for node in graph.nodes] for graph in (old, new))
    match: dict[int, int] = {}
    for block in SequenceMatcher(a=before, b=after, autojunk=False).get_matching_blocks():
        match.update({block.a + i: block.b + i for i in range(block.size)})
    for i in _moved(old, new, match):
        del match[i]
    back = {j: i for i, j in match.items()}
    old_edges = {(match[e.source], match[e.target], e.programmatic) for e in old.edges if _both(e, match)}
    new_edges = {(e.source, e.target, e.programmatic) for e in new.edges if _both(e, back)}
    return GraphDiff(
        old.name,
        new.name,
        tuple(_node_text(new, j) for j in range(len(new.nodes)) if j not in back),
        tuple(_node_text(old, i) for i in range(len(old.nodes)) if i not in match),
        tuple(_edge_text(new, edge) for edge in sorted(new_edges - old_edges)),
        tuple(_edge_text(new, edge) for edge in sorted(old_edges - new_edges)),
    )


def _moved(old: Topology, new: Topology, match: Mapping[int, int]) -> list[int]:
    """Matched nodes of `old` whose partners work on other memory than the partners before them let expect.

    A node more in front gives all later memory other numbers, so numbers are compared by what they stood for so far.
    """
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    moved = []
    for i, j in sorted(match.items()):
        a, b = old.nodes[i].memory, new.nodes[j].memory
        pairs = set(zip(a, b, strict=True))
        one_to_one = len(pairs) == len(set(a)) == len(set(b))
        if one_to_one and all(there.get(x, y) == y and back.get(y, x) == x for x, y in pairs):
            there.update(pairs)
            back.update((y, x) for x, y in pairs)
        else:
            moved.append(i)
    return moved


def _both(edge: Edge, known: dict[int, int]) -> bool:
    return edge.source in known and edge.target in known


def _node_text(graph: Topology, i: int) -> str:
    node = graph.nodes[i]
    facts = {key: value for key, value in node.facts.items() if key not in _TENSORS}
    return f"{i} {node.type} {node.title}" + (f" {json.dumps(facts, default=str)}" if facts else "")


def _edge_text(graph: Topology, edge: tuple[int, int, bool]) -> str:
    source, target, programmatic = edge
    names = f"{source} {graph.nodes[source].title} -> {target} {graph.nodes[target].title}"
    return names + (" (programmatic)" if programmatic else "")
