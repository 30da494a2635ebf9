"""An agent with a tool, on a Ray of its own. No key and no network: the model is the embedded one."""

from retinue import Agent, Budgets, Grants, Identity, Runtime, agent_driver, tool
from retinue.providers.extractive import ExtractiveModel


@tool
def lookup(id: str) -> str:
    """Read a record."""
    return f"Record {id} was approved on Monday. It is kept for ten years. Its owner is the finance team."


agent = Agent(name="clerk", model=ExtractiveModel(), tools=[lookup])
budgets = Budgets(max_model_calls=4, max_tokens=8000)
runtime = Runtime(driver=agent_driver(agent), grants=Grants(tool_ids=["lookup"]), budgets=budgets)
who = Identity(tenant_id="acme", user_id="ann")
result = runtime.run_blocking("id: 42\n\nWhen was the record approved?", identity=who, session_id="c-42")
print(result.status, result.text, result.budget, sep="\n")
