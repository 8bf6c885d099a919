"""Count the draft tokens of an answer among those that its rounds have kept.

A round keeps draft tokens before they are emitted. Those of a particle that is not drawn, of a
round after the answer's end, and in one column with the end or after it never are.
"""

import msgspec


class CorrectDrafts(msgspec.Struct):
    """The rounds of one request, by SGLang's count: all tokens of a round but one are drafts."""

    kept: list[int] = msgspec.field(default_factory=list)  # of rounds not yet wholly emitted
    num_emitted: int = 0  # tokens of the first of these
    counts: list[int] = msgspec.field(default_factory=list)  # of other rounds, to be taken
    num_new: int = 0  # tokens of the latest round, of which some may lie after the end

    def add_round(self, num_kept: int, num_new: int) -> None:
        """Add a round with so many kept draft tokens, and tokens that it puts out."""
        self.kept.append(num_kept)
        self.num_new = num_new

    def emit(self, num_after_end: int) -> int:
        """Emit the latest round's tokens but those after the end, and return their number.

        A round is whole with its kept tokens and a bonus token.
        """
        num_tokens = max(self.num_new - num_after_end, 0)
        self.num_new = 0
        self.num_emitted += num_tokens
        while self.kept and self.num_emitted > self.kept[0]:
            self.num_emitted -= self.kept[0] + 1
            self.counts.append(self.kept.pop(0))
        return num_tokens

    def cut(self) -> None:
        """Drop all tokens that are not emitted."""
        if self.kept:
            self.counts += [max(self.num_emitted - 1, 0), *[0] * (len(self.kept) - 1)]
        self.kept = []
        self.num_emitted = 0

    def take(self) -> list[int]:
        """Return the drafts of each round that has been emitted, or cut, since the last call."""
        taken = self.counts
        self.counts = []
        return taken
