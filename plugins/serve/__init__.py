"""What runs around a served model: the engine, the front that guards it, the gateway, the log."""
