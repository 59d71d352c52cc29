"""A figure is a PNG and a sentence, and leaves pyplot's global state alone."""

import base64
import sys

from grpo_lab.widgets import Picture, one_panel


def test_a_picture_is_a_png_and_words():
    pyplot_before = "matplotlib.pyplot" in sys.modules  # another test's import
    figure, axes = one_panel("More is less", "tokens", "memory, MiB")
    axes.plot([1, 2], [2, 1])
    bundle, metadata = Picture(figure, "A line that falls from 2 to 1 MiB.")._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert bundle["text/plain"] == metadata["image/png"]["alt"] == "A line that falls from 2 to 1 MiB."
    assert (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()) == (
        "More is less",
        "tokens",
        "memory, MiB",
    )
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_before
