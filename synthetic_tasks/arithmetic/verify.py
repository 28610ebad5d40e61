"""The verdict: is each step valid, and do the valid ones suffice?

A step is judged against the problem's definitions and what was stated before it, never against the gold trace, so any
order, any order of operands of + and *, and extra steps pass. The first that holds is its status:

unknown_quantity     it names a quantity that the problem does not have
redefined            its target has a value already, given or stated by a step
wrong_operand        the operands are not the target's; for - their order counts
wrong_operator       the operator is not the target's
used_before_defined  no value of an operand was given or stated
wrong_value          it quotes an operand with another value than the one stated (`operand`), or the result is not the
                     operation's (`result`)
inherited            all right, but the value stated for an operand earlier is not the true one
ok, extra            valid; the question needs the target, or does not

What a step states is what later steps are to quote, be it right or wrong; a redefinition states nothing.
The obligations are the operations that the question needs; only an `ok` step meets one. The process score is
obligations met / (obligations + invalid steps); a redefinition is invalid, an inherited step is not, it only fails to
meet its obligation.
"""

from __future__ import annotations

from synthetic_tasks.arithmetic.operators import apply
from synthetic_tasks.arithmetic.trace import Facts, Reading
from synthetic_tasks.base import StepVerdict, Verdict
from synthetic_tasks.family import conclude

STATUSES = (
    "ok",
    "extra",
    "inherited",
    "redefined",
    "unknown_quantity",
    "wrong_operand",
    "wrong_operator",
    "used_before_defined",
    "wrong_value",
)


def judge(facts: Facts, reading: Reading, *, ended: bool) -> Verdict:
    """The verdict on a completion as far as it was read; not `ended`: it was cut off, so it is not strict."""
    definitions, true_values, modulus = facts.definitions, facts.true_values, facts.modulus
    stated = dict(facts.given)
    needed = frozenset(facts.obligations)
    met: set[str] = set()
    steps: list[StepVerdict] = []
    for left, left_value, operator, right, right_value, target, result, position in reading.steps:
        detail = ""
        if target not in true_values or left not in true_values or right not in true_values:
            status = "unknown_quantity"
        elif target in stated:
            status = "redefined"
        else:
            right_operator, *operands = definitions[target]
            if operands != [left, right] and (right_operator == "-" or operands != [right, left]):
                status = "wrong_operand"
            elif operator != right_operator:
                status = "wrong_operator"
            elif left not in stated or right not in stated:
                status = "used_before_defined"
            elif stated[left] != left_value or stated[right] != right_value:
                status, detail = "wrong_value", "operand"
            elif result != apply(operator, left_value, right_value, modulus):
                status, detail = "wrong_value", "result"
            elif left_value != true_values[left] or right_value != true_values[right]:
                status = "inherited"
            elif target in needed:
                status = "ok"
                met.add(target)
            else:
                status = "extra"
        if target in definitions and target not in stated:
            stated[target] = result
        steps.append(StepVerdict(status, position, target, detail))
    return conclude(
        steps,
        obligations=facts.obligations,
        met=met,
        answer_correct=reading.answer == facts.values[facts.query],
        ended=ended,
        error=reading.error,
    )
