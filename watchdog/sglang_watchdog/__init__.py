"""sglang-watchdog: says why an SGLang launch under systemd ended, and brings the server back."""
