"""The keys a command was started with, kept out of everything else."""

import os


class Keys:
    """Keys taken out of the environment, which no child process inherits.

    Of a process there is one (`KEYS`), as there is one environment.
    """

    names = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")

    def __init__(self) -> None:
        self._held: dict[str, str] = {}

    def take(self) -> dict[str, str]:
        """Take the keys out of the environment; all of them by name."""
        for name in self.names:
            if value := os.environ.pop(name, ""):
                self._held[name] = value
        return dict(self._held)

    def present(self) -> bool:
        """Tell whether there is a key, taken already or not."""
        return bool(self._held) or any(os.environ.get(name) for name in self.names)

    def redacted(self, text: str) -> str:
        """`text` without the keys that were taken."""
        for name, value in self._held.items():
            text = text.replace(value, f"<{name}>")
        return text


KEYS = Keys()
