"""Each case needs an interpreter that hasn't imported torch yet."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

PREAMBLE = """
import sys
from evertrain.torch import lazy_dynamo
assert lazy_dynamo.install()
assert "torch" not in sys.modules
import torch

def adam_step(model, batch):
    optimizer = torch.optim.Adam(model.parameters())
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def is_real():
    import types
    return type(sys.modules["torch._dynamo"]) is types.ModuleType and "torch._dynamo.eval_frame" in sys.modules
"""


def run(code: str, preamble: str = PREAMBLE, **env: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", preamble + textwrap.dedent(code)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_ordinary_training_never_loads_the_compiler():
    run(
        """
        import copy, io
        import torch.distributed as dist
        from datetime import timedelta
        from torch import nn
        from torch.optim import lr_scheduler
        from torch.utils.data import DataLoader, TensorDataset

        model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        batch = torch.randn(2, 3, 8)
        for choice in (dict(), dict(foreach=True), dict(foreach=False), dict(fused=True)):
            for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
                optimizer = kind(model.parameters(), lr=0.1, **choice)
                schedule = lr_scheduler.CosineAnnealingLR(optimizer, 10)
                scaler = torch.amp.GradScaler("cpu")
                scaler.scale(model(batch).sum()).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                optimizer.zero_grad()
                optimizer.register_load_state_dict_post_hook(lambda optimizer: None)
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        nn.functional.scaled_dot_product_attention(*[torch.randn(1, 2, 4, 8, requires_grad=True)] * 3).sum().backward()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file))
        list(DataLoader(TensorDataset(torch.ones(8, 2)), 2, shuffle=True, num_workers=1))
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5)).allreduce([torch.ones(3)]).wait()
        # Calls torch._dynamo.trace_rules.clear_lru_cache() because the package is in sys.modules.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
        from torch.utils.checkpoint import checkpoint
        checkpoint(model, batch.requires_grad_(), use_reentrant=True).sum().backward()
        torch.manual_seed(3)

        assert "torch._dynamo" in sys.modules
        assert lazy_dynamo.is_light()
        assert not [name for name in sys.modules if name.startswith("torch._dynamo.")]
        """
    )


@pytest.mark.parametrize("first", ["step", "compile"])
def test_compiling_gives_the_same_results_in_either_order(first):
    run(
        f"""
        import copy
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        batch = torch.randn(4, 8)
        eager = copy.deepcopy(model)

        def compile_and_train():
            compiled = torch.compile(model, backend="eager")
            loss = compiled(batch).sum()
            loss.backward()
            return loss

        if {first == "step"}:
            adam_step(model, batch)
            assert lazy_dynamo.is_light()
            loss = compile_and_train()
            adam_step(eager, batch)
        else:
            loss = compile_and_train()
        assert is_real() and not lazy_dynamo.is_light()
        expected = eager(batch).sum()
        expected.backward()
        assert torch.equal(loss, expected)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters()))
        adam_step(model, batch)
        adam_step(eager, batch)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters()))
        torch._dynamo.reset()
        """
    )


USES = {
    "attribute": "torch._dynamo.reset()",
    "submodule": "import torch._dynamo.config; assert torch._dynamo.config.cache_size_limit",
    "from package": "from torch._dynamo import optimize",
    "nested submodule": "from torch._dynamo.variables.builder import VariableBuilder",
    "trace rules": "assert torch._dynamo.trace_rules.SKIP_DIRS",
    "dir": "assert 'optimize' in dir(torch._dynamo)",
    "disable a module": "torch.compiler.disable(torch.nn.Linear(2, 2))",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("use", USES)
def test_any_real_use_loads_the_package_once_and_in_place(use):
    run(
        f"""
        import torch._dynamo
        before = torch._dynamo
        adam_step(torch.nn.Linear(2, 2), torch.ones(1, 2))
        assert lazy_dynamo.is_light()
        executed = []
        import importlib.machinery
        real_exec = importlib.machinery.SourceFileLoader.exec_module
        def spy(loader, module):
            executed.append(module.__name__)
            real_exec(loader, module)
        importlib.machinery.SourceFileLoader.exec_module = spy
        {USES[use]}
        assert is_real()
        assert torch._dynamo is before is sys.modules["torch._dynamo"]
        ours = [name for name in executed if name.startswith("torch._dynamo")]
        assert len(ours) > 50 and len(ours) == len(set(ours)), sorted(ours)
        # What the import system writes into a module must be that of the real package.
        assert torch._dynamo.__spec__.submodule_search_locations == torch._dynamo.__path__
        assert torch._dynamo.__package__ == "torch._dynamo"
        for name, module in sys.modules.items():
            if name.startswith("torch._dynamo.") and name in ours:
                assert type(module.__spec__.loader).__name__ == "SourceFileLoader", name
        """
    )


def test_functions_disabled_before_are_really_disabled_after():
    run(
        """
        from torch.compiler import is_compiling

        @torch.compiler.disable
        def plain(x):
            seen.append(is_compiling())
            return x + 1

        @torch._dynamo.disable()
        def called(x):
            seen.append(is_compiling())
            return x + 1

        @torch._dynamo.disable(recursive=False)
        def shallow(x):
            seen.append(is_compiling())
            return x + 1

        def function(x):
            seen.append(is_compiling())
            return x + 1

        unwrapped = torch._dynamo.disable(function, True, wrapping=False)
        assert lazy_dynamo.is_light()
        seen = []
        everything = (plain, called, shallow, unwrapped)
        one = torch.ones(1)
        assert all(disabled(one).item() == 2 for disabled in everything)
        assert lazy_dynamo.is_light()
        assert plain.__name__ == "plain" and plain.__wrapped__ is not None

        graphs = []
        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        for disabled in everything:
            graphs.clear()
            seen.clear()
            torch._dynamo.reset()
            assert torch.compile(lambda x: disabled(x * 2) * 3, backend=backend)(one).item() == 9
            # Two graphs with the disabled function run by Python between them, and not traced into.
            assert len(graphs) == 2, disabled
            assert seen == [False], disabled
        """
    )


@pytest.mark.matrix
def test_a_program_that_steps_and_then_compiles_the_step_is_the_same_with_and_without():
    code = """
        from evertrain.torch import lazy_dynamo
        lazy_dynamo.install()
        import torch
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        graphs = []
        def backend(graph, inputs):
            graphs.append(graph.code)
            return graph.forward
        step = torch.compile(optimizer.step, backend=backend)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            step()
        print(graphs, [p.tolist() for p in model.parameters()])
        """
    with_it, without = (run(code, preamble="", EVERTRAIN_LAZY_DYNAMO=value).stdout for value in "10")
    assert "torch" in with_it
    assert with_it == without


@pytest.mark.matrix
@pytest.mark.exhaustive
def test_threads_that_need_it_at_the_same_time_all_get_it():
    run(
        """
        import threading
        import torch._dynamo
        failures = []
        start = threading.Barrier(4)
        def use():
            start.wait()
            try:
                torch._dynamo.graph_break()
                torch._dynamo.disable(lambda: None)()
                torch._dynamo.config.cache_size_limit
                torch._dynamo.optimize
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=use) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not failures, failures
        """
    )


@pytest.mark.matrix
@pytest.mark.exhaustive
def test_a_load_that_is_interrupted_can_be_repeated():
    run(
        """
        import importlib.machinery
        import torch._dynamo
        real_exec = importlib.machinery.SourceFileLoader.exec_module
        def interrupt(loader, module):
            if module.__name__ == "torch._dynamo.config":
                raise KeyboardInterrupt
            real_exec(loader, module)
        importlib.machinery.SourceFileLoader.exec_module = interrupt
        try:
            torch._dynamo.config
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("not interrupted")
        assert lazy_dynamo.is_light()
        adam_step(torch.nn.Linear(2, 2), torch.ones(1, 2))
        assert lazy_dynamo.is_light()
        importlib.machinery.SourceFileLoader.exec_module = real_exec
        assert torch._dynamo.config.cache_size_limit
        assert is_real()
        """
    )


def test_walking_over_all_modules_does_not_load_it():
    run(
        """
        import inspect, torch._dynamo
        for module in list(sys.modules.values()):
            for name in ("__file__", "__wrapped__", "__warningregistry__", "__spec__", "__loader__"):
                try:
                    hasattr(module, name)
                except Exception:
                    pass
        inspect.getmodule(adam_step)
        assert lazy_dynamo.is_light()
        """
    )


@pytest.mark.matrix
def test_it_can_be_switched_off():
    run(
        """
        from evertrain.torch import lazy_dynamo
        import sys
        assert not lazy_dynamo.install()
        import torch
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        assert "torch._dynamo.eval_frame" in sys.modules
        """,
        preamble="",
        EVERTRAIN_LAZY_DYNAMO="0",
    )
