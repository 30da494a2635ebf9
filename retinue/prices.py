"""What models cost: the application's price table.

Amounts are exact. Inside the ledger they are whole numbers of :data:`UNIT`, a billionth of the currency; what
a call costs is rounded up to one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction

from retinue.budgets import Usage
from retinue.errors import ValidationFailed

UNIT = Decimal("1e-9")
"""What the ledger counts money in."""
_UNITS_PER_TOKEN = Fraction(10**9, 10**6)
"""Of a price of one for a million tokens."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """Money for a million tokens of one model; an ``int``, a ``str`` and a ``float`` are taken too."""

    input: Decimal
    output: Decimal
    cached_input: Decimal | None = None
    """For input that the provider had in its cache; as other input by default."""

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input"):
            value: object = getattr(self, name)
            if value is None and name == "cached_input":
                continue
            object.__setattr__(self, name, _amount(f"price.{name}", value))

    def cost(self, usage: Usage) -> int:
        """What a call with this usage costs, in :data:`UNIT`, rounded up."""
        cached = min(usage.cached_tokens, usage.input_tokens)
        cached_price = self.input if self.cached_input is None else self.cached_input
        whole = (
            (usage.input_tokens - cached) * _per_token(self.input)
            + cached * _per_token(cached_price)
            + usage.output_tokens * _per_token(self.output)
        )
        return -(-whole.numerator // whole.denominator)

    def bound(self, input_tokens: int, output_tokens: int) -> int:
        """The most that a call of this size can cost, in :data:`UNIT`: nothing of it comes from a cache."""
        dearest = max(self.input, self.cached_input or Decimal(0))
        whole = input_tokens * _per_token(dearest) + output_tokens * _per_token(self.output)
        return -(-whole.numerator // whole.denominator)

    def output_for(self, units: int, input_tokens: int) -> int | None:
        """Tokens of output that ``units`` pay for after the input; ``None`` where output costs nothing."""
        left = Fraction(units - self.bound(input_tokens, 0))
        price = _per_token(self.output)
        if price == 0:
            return None if left >= 0 else -1
        return int(left / price) if left >= 0 else -1


@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """Prices by model, as ``"<provider id>/<model id>"`` or ``"<model id>"``; the first is looked for
    first."""

    version: str
    """Of this table, in the application's words; it stands in every budget snapshot."""
    models: Mapping[str, Price] = field(default_factory=dict)
    currency: str = "USD"

    def __post_init__(self) -> None:
        for name in ("version", "currency"):
            text: object = getattr(self, name)
            if not isinstance(text, str) or not text:
                raise ValidationFailed(
                    f"prices.{name} must be a nonempty string, not {text!r:.80}", path=f"prices.{name}"
                )
        models: object = self.models
        if not isinstance(models, Mapping):
            raise ValidationFailed(
                f"prices.models must map models to prices, not be {models!r:.80}", path="prices.models"
            )
        for model, price in models.items():
            if not isinstance(model, str) or not model or not isinstance(price, Price):
                raise ValidationFailed(
                    f"prices.models must map models to retinue.Price; {model!r:.80}: {price!r:.80}",
                    path=f"prices.models.{model!s:.80}",
                )
        object.__setattr__(self, "models", dict(models))

    def find(self, provider_id: str, model_id: str) -> Price | None:
        """The price of a model, or ``None`` where the table does not have it."""
        return self.models.get(f"{provider_id}/{model_id}") or self.models.get(model_id)


def units_of(amount: Decimal) -> int:
    """An amount in :data:`UNIT`, rounded down: a limit is never more than was said."""
    return int(Fraction(amount) * 10**9)


def amount_of(units: int) -> Decimal:
    """An amount of :data:`UNIT` in the currency, without zeros at its end."""
    whole, part = divmod(units, 10**9)
    return Decimal(whole) if not part else Decimal(f"{whole}.{part:09}".rstrip("0"))


def shown_amount(amount: Decimal) -> str:
    """An amount for people: digits, never an exponent."""
    return f"{amount:f}"


def _per_token(price: Decimal) -> Fraction:
    return Fraction(price) * _UNITS_PER_TOKEN


def _amount(path: str, value: object) -> Decimal:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
            raise ValueError
        amount = Decimal(str(value))
        if not amount.is_finite() or amount < 0:
            raise ValueError
    except (ValueError, ArithmeticError):
        raise ValidationFailed(f"{path} must be a nonnegative amount, not {value!r:.80}", path=path) from None
    return amount
