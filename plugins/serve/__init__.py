"""What runs around a served model: the backend, the front that guards it, the gateway, the log."""
