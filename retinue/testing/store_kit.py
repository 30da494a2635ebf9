"""The conformance kit of the store seam: what every engine must do, ours and yours.

It needs no test framework. All rules at once::

    asyncio.run(check_store_engine(open_engine))

or, with pytest, one test for each::

    @pytest.mark.parametrize("rule", STORE_RULES.values(), ids=STORE_RULES)
    def test_rule(rule):
        asyncio.run(rule.check(open_engine))

``await open_engine(name)`` opens the store called ``name``: an empty one at first, and where the store is
durable the same one again, once its engine was closed. What a clock or a dead process decides is not covered:
show with tests of your own that a lease is taken over when they say so, and only then.
"""

from __future__ import annotations

from collections.abc import Sequence

from retinue.testing import (
    store_approval_rules,
    store_commit_rules,
    store_engine_rules,
    store_lease_rules,
    store_list_rules,
    store_run_rules,
    store_session_rules,
)
from retinue.testing.store_trial import STORE_RULES, OpenEngine, StoreRule, StoreRuleBroken

__all__ = ["STORE_RULES", "OpenEngine", "StoreRule", "StoreRuleBroken", "check_store_engine"]


RULE_MODULES = (
    store_lease_rules,
    store_commit_rules,
    store_run_rules,
    store_session_rules,
    store_list_rules,
    store_approval_rules,
    store_engine_rules,
)
"""Where the rules are; importing them has filled :data:`STORE_RULES`."""


async def check_store_engine(open_engine: OpenEngine) -> Sequence[str]:
    """Check every rule, one after another; the names of those checked.

    Args:
        open_engine: opens an engine on the store of a name.

    Raises:
        StoreRuleBroken: the first rule that is not kept.
    """
    for rule in STORE_RULES.values():
        await rule.check(open_engine)
    return tuple(STORE_RULES)
