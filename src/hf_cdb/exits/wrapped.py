"""Rules around another rule."""

from .rule import ExitRule

__all__ = ["Wrapped"]


class Wrapped(ExitRule):
    """Base of rules that look at what another rule says: by itself it decides what that one does.

    Args:
        rule: the other one; it sees everything that it would see without this one.
    """

    def __init__(self, rule: ExitRule):
        self.rule, self.name, self.higher_is_deeper = rule, rule.name, rule.higher_is_deeper
        self.needs_logits = rule.needs_logits
        self.reads_state, self.reads_previous = rule.reads_state, rule.reads_previous
        super().__init__(rule.threshold)

    def configure(self, adapter, depth, lookahead):
        super().configure(adapter, depth, lookahead)
        self.rule.configure(adapter, depth, lookahead)

    def copy(self):
        own = super().copy()
        own.rule = self.rule.copy()
        return own

    def bind(self, adapter, places):
        super().bind(adapter, places)
        self.rule.bind(adapter, places)

    def begin(self, places, embeds, start, tokens):
        self.rule.begin(places, embeds, start, tokens)

    def leave(self, places, depths, previous, state, logits):
        return self.rule.leave(places, depths, previous, state, logits)
