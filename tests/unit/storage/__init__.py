"""The stores: both engines against the kit, and what each does alone."""
