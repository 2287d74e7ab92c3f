"""The topology of a recording: stable, comparable, and pinned for a deferred step."""

import json
from pathlib import Path

import pytest
import torch

from graphrt import KDADeferredCommitContext, launch
from graphrt.capture import Edge, GraphNode, Topology, diff, record
from graphrt.testing import deferred_step, dummy_batch, poisoned_pool

PINNED = Path(__file__).parent / "data" / "deferred_step.json"


def recorded_step(layers=2, after=lambda outputs: None):
    """A recording of the deferred step of a small model, `after` behind it."""
    pool = poisoned_pool(num_layers=layers)
    context = KDADeferredCommitContext.create(
        pool.layers, spec_query_len=pool.spec_query_len, max_num_reqs=6, backend="torch"
    )
    batch = dummy_batch(pool, size=2)

    def step():
        outputs = deferred_step(context, pool, batch, backend="torch")
        after(outputs)
        return outputs

    return record(step, device="cpu", warmup=0, name="deferred step")


def summary(topology):
    """The topology as one short line a node: what it launches, on which memory, of which shapes."""

    def tensors(entries):
        return [f"m{t['memory']} {t['dtype']}{t['shape']}" for t in entries]

    nodes = [[n.name, *tensors(n.facts["inputs"]), "->", *tensors(n.facts["outputs"])] for n in topology.nodes]
    return {"nodes": nodes, "edges": [[e.source, e.target] for e in topology.edges]}


def test_the_topology_of_a_deferred_step_is_pinned():
    """A launch, copy or edge more or less than in the committed file fails; write the file anew if it is meant."""
    got = summary(recorded_step().topology())
    assert json.loads(json.dumps(got)) == json.loads(PINNED.read_text()), (
        f"the deferred step launches something else now; if so intended, put this into {PINNED.name}:\n"
        + json.dumps(got)
    )


def test_recordings_of_one_program_have_one_topology():
    """No address and no order of allocation shows in it, and the diff is empty."""
    a, b = recorded_step(), recorded_step()
    assert a.topology() == b.topology() and a.topology().as_dict() == b.topology().as_dict()
    assert not diff(a, b) and str(diff(a, b)) == "'deferred step' and 'deferred step' are alike"


def test_a_stray_copy_is_one_added_node():
    """The diff of a step with one copy more names that copy, and the pinned file would fail."""
    found = diff(recorded_step(), recorded_step(after=lambda outputs: outputs[0].clone()))
    assert [text.split(" ", 1)[1] for text in found.nodes_added] == ["launch aten.clone.default"]
    assert not found.nodes_removed
    assert str(found).startswith("from 'deferred step' to 'deferred step':\n+ node ")


def added_and_removed(found):
    """Names of the nodes that a diff reports."""
    return [[text.split()[2] for text in texts] for texts in (found.nodes_added, found.nodes_removed)]


def test_a_stray_copy_in_front_is_the_only_difference():
    """What follows it works on other memory by name, but on the same by use."""
    x, y, z = (torch.zeros(4) for _ in range(3))

    def step(source):
        t = source() * 2
        y.add_(t)
        z.copy_(y + 1)
        z.mul_(t)

    plain, stray = (record(lambda source=source: step(source), device="cpu") for source in (lambda: x, x.clone))
    assert added_and_removed(diff(plain, stray)) == [["aten.clone.default"], []]
    assert added_and_removed(diff(stray, plain)) == [[], ["aten.clone.default"]]


@pytest.mark.parametrize("wrong", ["source", "target", "both"])
def test_a_launch_on_the_wrong_memory_is_reported(wrong):
    """Shapes and operator are the same; the tensor is another one of the step."""
    x, y, z = (torch.zeros(4) for _ in range(3))

    def step(target, source):
        y.copy_(x)
        z.copy_(y)
        target.add_(source)

    named = {"source": (z, y), "target": (y, x), "both": (y, y)}
    right, other = (record(lambda pair=pair: step(*pair), device="cpu") for pair in ((z, x), named[wrong]))
    assert added_and_removed(diff(right, other)) == [["aten.add_.Tensor"]] * 2


def test_a_step_has_one_launch_a_layer_and_kind_and_one_commit():
    """graphrt's launches per step: a convolution and a verify a layer, and one commit for all of them."""
    for layers in (1, 3):
        names = [node.name for node in recorded_step(layers).topology().nodes if node.name.startswith("graphrt.")]
        assert names == ["graphrt.conv_verify", "graphrt.deferred_verify"] * layers + ["graphrt.commit"]


def test_branches_do_not_grow_with_the_layers():
    """A step is one chain whatever the number of layers (B98)."""
    for layers in (1, 3):
        topology = recorded_step(layers).topology()
        assert topology.num_branches == 1 and topology.longest_chain == len(topology.nodes)


def graph(nodes, edges, name="g"):
    return Topology(name, "cuda", tuple(GraphNode("kernel", n) for n in nodes), tuple(Edge(*e) for e in edges))


def test_chains_and_branches_of_a_graph():
    """The longest chain counts nodes in order, branches those that may run side by side."""
    fork = graph("abcd", [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert (fork.longest_chain, fork.num_branches) == (3, 2)
    assert (graph("", []).longest_chain, graph("", []).num_branches) == (0, 0)
    assert graph("ab", []).num_branches == 2


def test_a_lost_edge_and_a_plain_edge_made_programmatic_are_reported():
    """Edges between nodes that both recordings have are compared with their kind (B59)."""
    a = graph(["plan", "fold", "conv"], [(0, 1), (1, 2)], "a")
    found = diff(a, graph(["plan", "fold", "conv"], [(0, 1, True)], "b"))
    assert found.edges_removed == ("0 plan -> 1 fold", "1 fold -> 2 conv")
    assert found.edges_added == ("0 plan -> 1 fold (programmatic)",)
    assert not found.nodes_added and not found.nodes_removed and found


def test_a_node_put_between_two_others_takes_their_edge():
    """The new node and the direct edge that is gone are reported; edges of the new node are not repeated."""
    a, b = graph("ab", [(0, 1)]), graph("axb", [(0, 1), (1, 2)])
    found = diff(a, b)
    assert found.nodes_added == ("1 kernel x",) and found.edges_removed == ("0 a -> 2 b",)
    assert not found.edges_added
    back = diff(b, a)
    assert back.nodes_removed == ("1 kernel x",) and back.edges_added == ("0 a -> 1 b",)


def test_programmatic_edges_and_memory_nodes_show_in_every_form():
    """JSON marks them, DOT draws them dashed and as boxes, and a query lists them by name (B59, B75)."""
    nodes = (
        GraphNode("kernel", "plan", "graphrt.commit", {"grid": [1, 1, 1]}),
        GraphNode("kernel", 'fold"x', "graphrt.commit"),
        GraphNode("memcpy", "host to device", "", {"bytes": 16}),
    )
    topology = Topology("commit", "cuda", nodes, (Edge(0, 1, True), Edge(1, 2)))
    assert topology.programmatic() == [("plan", 'fold"x')]
    assert topology.counts() == {"kernel": 2, "memcpy": 1}
    told = topology.as_dict()
    assert told["edges"] == [{"from": 0, "to": 1, "programmatic": True}, {"from": 1, "to": 2}]
    assert told["nodes"][2] == {"index": 2, "type": "memcpy", "name": "host to device", "bytes": 16}
    dot = topology.dot()
    assert "n0 -> n1 [style=dashed];" in dot and "shape=box" in dot and 'fold\\"x' in dot
    assert "graphrt.commit: plan" in dot


def test_topology_after_close_raises():
    """A closed recording has no topology."""
    x = torch.zeros(1)
    recording = record(lambda: launch.launch("graphrt.fold", lambda t: None, x), device="cpu", warmup=0)
    assert recording.topology().nodes[0].name == "graphrt.fold"
    recording.close()
    with pytest.raises(RuntimeError, match=r"^topology after close"):
        recording.topology()


def test_the_steps_tensors_appear_in_the_launches():
    """Metadata inside of step objects, and the layers that a commit reaches by address, are part of the topology."""
    topology = recorded_step().topology()
    commit = topology.nodes[[n.name for n in topology.nodes].index("graphrt.commit")]
    shapes = [tuple(t["shape"]) for t in commit.facts["inputs"]]
    assert shapes.count((8, 2, 16, 16)) == 2, "the checkpoints of both layers"
    assert (3,) in shapes, "query_start_loc"
