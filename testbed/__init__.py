"""Raise a small transformer from nothing and attribute what it can do to the stage that taught it.

    model, tokenizer = testbed.load("quickstart/mid")
    testbed.generate(model, tokenizer, [problem.prompt], samples=4)
    testbed.results("quickstart").outcomes

    spec = testbed.load_spec("quickstart", ["seeds=[0]"])
    for node in testbed.plan(spec): print(node.key, node.kind, node.state, node.tokens, node.flops)
    testbed.run(spec)

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.notebook import export, generate, load, load_spec, plan, results, run, score

__all__ = ["export", "generate", "load", "load_spec", "plan", "results", "run", "score"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from testbed import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
