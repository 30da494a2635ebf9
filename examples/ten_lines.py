from retinue import Agent, Budgets, Grants, Identity, Runtime, agent_driver, tool
from retinue.providers.extractive import ExtractiveModel


@tool
def lookup(id: str) -> str:
    """Read a record."""
    return f"Record {id} was approved on Monday. Its owner is the finance team. It is kept for ten years."


clerk = agent_driver(Agent(name="clerk", model=ExtractiveModel(), tools=[lookup]))
runtime = Runtime(driver=clerk, grants=Grants(tool_ids=["lookup"]), budgets=Budgets(max_tokens=9000))
who = Identity(tenant_id="acme", user_id="ann")
print(runtime.run_blocking("id: 42\n\nWhen was the record approved?", identity=who, session_id="c-42").text)
