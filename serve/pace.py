"""How much of long prompts is read beside running answers: a share of the time, learnt from the steps themselves."""

from typing import NamedTuple

from muse_fn.serve.scheduler import Work

SLICE = 0.04  # seconds that a step may become longer by a long prompt
FIRST = 64  # tokens of the first slice, of which nothing is known
MEMORY = 0.7  # weight of what was known before


class Pace(NamedTuple):
    """What the last steps have shown. Times are seconds."""

    share: float  # of the time, what long prompts may take
    decode: float = 0.0  # a step without prompts
    token: float = 0.0  # a token of a long prompt
    owed: float = 0.0  # that answers must run alone before a long prompt is read on

    def tokens(self, chunk: int) -> int:
        """Tokens of long prompts that the next step may read beside running answers."""
        if self.owed > 0 or self.share <= 0:
            return 0
        return min(chunk, FIRST) if self.token <= 0 else max(1, min(chunk, int(SLICE / self.token)))

    def after(self, work: Work, seconds: float, chunk: int) -> "Pace":
        """With what one more step has shown; `chunk` is how short a prompt must be not to be a long one."""
        read = sum(len(share.tokens) for share in work.reads)
        if not work.decodes:  # nobody had to wait; a whole chunk says what a token costs
            known = _mixed(self.token, seconds / read) if read >= chunk else self.token
            return self._replace(token=known, owed=max(0.0, self.owed - seconds))
        if not work.reads:
            return self._replace(decode=_mixed(self.decode, seconds), owed=max(0.0, self.owed - seconds))
        spent = max(seconds - self.decode, 0.0)
        is_long = any(not share.draws for share in work.reads)
        token = _mixed(self.token, spent / read) if is_long else self.token
        more = spent * (1 - self.share) / self.share if is_long and self.share > 0 else 0.0
        return self._replace(token=token, owed=self.owed + more)


def _mixed(known: float, new: float) -> float:
    return new if known <= 0 else MEMORY * known + (1 - MEMORY) * new
