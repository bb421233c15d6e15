"""How docstrings become pages: what stands under `Example:` is shown as code, not read as prose."""

from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Griffe knows sections called `Examples:`, with an s; those here have one example each."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rename the section, in the copy that griffe has read."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("Example:\n", "Examples:\n")
