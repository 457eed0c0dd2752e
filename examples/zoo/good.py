GOOD: dict[str, dict[str, str]] = {}
