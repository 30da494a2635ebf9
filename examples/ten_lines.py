from retinue import Agent, Budgets, Grants, Identity, Runtime, agent_driver, tool
from retinue.providers.extractive import ExtractiveModel

@tool
def lookup(id: str) -> str:
    """Read a record."""
    return f"Record {id} was approved on Monday. It is kept for ten years. Its owner is the finance team."

agent = Agent(name="clerk", model=ExtractiveModel(), tools=[lookup])
runtime = Runtime(driver=agent_driver(agent), grants=Grants(tool_ids=["lookup"]), budgets=Budgets(max_tokens=8000))
result = runtime.run_blocking("id: 42\n\nWhen was the record approved?", identity=Identity(tenant_id="acme", user_id="ann"), session_id="c-42")
print(result.status, result.text, result.budget)
