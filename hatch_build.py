"""What does the distribution `segue` depend on? On `segue-server` and `segue-conform` of its own version."""

from __future__ import annotations

from hatchling.metadata.plugin.interface import MetadataHookInterface


class DependenciesHook(MetadataHookInterface):
    """Takes the dependencies from `tool.hatch.metadata.hooks.custom` in pyproject.toml, with the version filled in."""

    def update(self, metadata: dict[str, object]) -> None:
        """Add the dependencies to the fields of `project`."""
        version = metadata["version"]
        lines: list[str] = self.config["dependencies"]
        metadata["dependencies"] = [line.format(version=version) for line in lines]
