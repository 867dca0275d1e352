"""What a job needs of torch: seen in a rank, left on its board, imported by a spare."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from evertrain.mindio.board import Board


def test_the_list_goes_over_the_board() -> None:
    rank = Board()
    agent = Board(os.dup(rank.fd))
    assert agent.imports == []
    rank.leave_imports(["torch.nn", "torch.distributed"])
    rank.progress(3)
    assert (agent.imports, agent.step) == (["torch.nn", "torch.distributed"], 3)
    rank.leave_imports(["torch.nn"])
    assert agent.imports == ["torch.nn"], "nothing is left of a longer list"
    for board in (rank, agent):
        board.close()


def test_modules_of_torch_and_no_compiler_that_was_put_off() -> None:
    """In a process of its own: what this one has imported depends on the tests before."""
    code = """
        from evertrain.torch import imports, lazy_dynamo
        lazy_dynamo.install()
        import torch, torch.distributed.tensor, json
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        names = imports.loaded()
        assert lazy_dynamo.is_light() and "torch._dynamo" not in names
        assert {"torch.nn", "torch.distributed.tensor"} <= set(names) and not {"json", "torch.ops"} & set(names)
        imports.load(["torch._dynamo", "torch.none_such"])
        assert not lazy_dynamo.is_light() and "torch._dynamo" in imports.loaded()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
