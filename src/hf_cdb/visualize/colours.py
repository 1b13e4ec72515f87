"""Colours of depths, light where a token left early and dark where it went deep."""

__all__ = ["depth_colours", "ink_on"]

# Nine stops of cividis (Nunez, Anderton and Renslow, 2018, PLOS ONE 13(7): e0199239), from its light end: lightness
# falls evenly, and eyes with and without colour deficiencies see nearly the same.
_STOPS = ("#fee838", "#dec958", "#bcae6c", "#9b9476", "#7d7c78", "#61656f", "#434e6c", "#1a386f", "#00224e")


def depth_colours(full_depth: int) -> list[str]:
    """A colour `#rrggbb` for every depth from 1 to `full_depth`, evenly spaced.

    Raises:
        ValueError: less than one depth.
    """
    if full_depth < 1:
        raise ValueError(f"full_depth={full_depth}: a token runs at least one loop. Choose 1 or more.")
    return [_colour((depth - 1) / max(full_depth - 1, 1)) for depth in range(1, full_depth + 1)]


def ink_on(colour: str) -> str:
    """Black or white, whichever contrasts more with `#rrggbb` (WCAG 2.2, contrast ratio)."""
    light = _luminance(colour)
    return "#000000" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "#ffffff"


def _colour(place: float) -> str:
    """The colour at `place`, from 0 to 1, between the two stops around it."""
    place *= len(_STOPS) - 1
    below = min(int(place), len(_STOPS) - 2)
    pairs = zip(_channels(_STOPS[below]), _channels(_STOPS[below + 1]), strict=True)
    return "#" + "".join(f"{round(low + (place - below) * (high - low)):02x}" for low, high in pairs)


def _channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def _luminance(colour: str) -> float:
    """Relative luminance of sRGB, from 0 to 1 (WCAG 2.2)."""
    parts = (channel / 255 for channel in _channels(colour))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
