"""Conversations of several turns: the policy answers, and an environment of the user's replies.

The token ids of every answer are kept as they were drawn; the environment's turns are tokenised
once, by the chat template, and are not trained on.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plugins.rl.rewards.pool import Pool, Reply, Turn
from plugins.rl.rollouts import Answer, Asked
from trainer.errors import ConfigError

# In the place of an answer, where the template is asked what follows one.
_ANSWER = "[[the answer]]"


def following(tokenizer: Any, turns: Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens behind an answer's end token: these turns, and what begins the next answer.

    Without turns, what ends a conversation. Without a chat template the turns' texts.

    Raises:
        ConfigError: the template leaves the answer out, or refuses the turns.
    """
    if not getattr(tokenizer, "has_chat_template", False):
        tokens: list[int] = tokenizer.encode("".join(str(turn["content"]) for turn in turns))
        return tokens
    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    text = tokenizer.render([*before, *turns], add_generation_prompt=bool(turns))
    if _ANSWER not in text:
        raise ConfigError("tokenizer: the chat template leaves an answer out of a conversation")
    tokens = tokenizer.encode(text.rpartition(_ANSWER)[2])
    return tokens[1:] if tokens and tokens[0] in tokenizer.ends else tokens


class Turns:
    """Lets the policy and the environment of one reward take turns.

    Args:
        sample: answers, in order, of a rank that answers; as Sampler.answers.
        name: the reward's. most: answers of a conversation. room: tokens of one, the environment's
            included.
    """

    def __init__(
        self,
        sample: Callable[[Sequence[Asked]], list[Answer]],
        pool: Pool,
        tokenizer: Any,
        name: str,
        most: int,
        room: int,
    ) -> None:
        self._sample, self._pool, self._tokenizer = sample, pool, tokenizer
        self._name, self._most, self._room = name, most, room

    def play(
        self, asked: Sequence[Asked], rows: Mapping[int, Mapping[str, Any]]
    ) -> tuple[list[Answer], list[tuple[float | None, bool]]]:
        """The conversations, as answers of several turns; and of each its score, None if the
        environment gave none, and whether it failed.
        """
        talks = self._sample(asked)
        texts: list[list[str]] = [[] for _ in asked]
        scores: list[tuple[float | None, bool]] = [(None, False) for _ in asked]
        new, open_ones = list(talks), [n for n, each in enumerate(talks) if each.tokens]
        for turn in range(1, self._most + 1):
            for n in open_ones:
                texts[n].append(self._tokenizer.decode(new[n].tokens))
            questions = [
                Turn(rows[asked[n].sample], texts[n], f"{asked[n].draw} {asked[n].sample}")
                for n in open_ones
            ]
            replies = self._pool.step(self._name, questions) if questions else []
            goes_on: list[tuple[int, Asked]] = []
            for n, reply in zip(open_ones, replies, strict=True):
                if reply is None:
                    scores[n] = None, True
                    continue
                if reply.score is not None:
                    scores[n] = (scores[n][0] or 0.0) + reply.score, False
                # An answer that was cut is the last one: nothing can follow it.
                if reply.turns is not None and talks[n].ended and turn < self._most:
                    own, talk = self._following(reply), talks[n]
                    if own is None:
                        scores[n] = None, True
                        continue
                    used = len(talk.tokens) + len(own)
                    if used < self._room:
                        talks[n] = talk._replace(
                            tokens=talk.tokens + own,
                            sampled=(talk.sampled or [True] * len(talk.tokens))
                            + [False] * len(own),
                        )
                        prompt = asked[n].prompt + talks[n].tokens
                        draw = f"{asked[n].draw} turn {turn}"
                        goes_on.append((n, Asked(asked[n].sample, prompt, draw, used)))
            open_ones = []
            answers = self._sample([each for _, each in goes_on]) if goes_on else []
            for (n, _), answer in zip(goes_on, answers, strict=True):
                talk = talks[n]
                if not answer.tokens:
                    continue  # no room for another answer: the conversation ends here
                talks[n] = talk._replace(
                    tokens=talk.tokens + answer.tokens,
                    log_probs=talk.log_probs + answer.log_probs,
                    sampled=talk.sampled + [True] * len(answer.tokens),
                    ended=answer.ended,
                )
                new[n] = answer
                open_ones.append(n)
            if not open_ones:
                break
        return talks, scores

    def try_on(self, rows: Sequence[Mapping[str, Any]], answer: str) -> None:
        """Ask the environment what follows an answer; Pool.messages has what goes wrong."""
        asked = [Turn(row, [answer], f"tried {number}") for number, row in enumerate(rows)]
        for reply in self._pool.step(self._name, asked):
            if reply is not None:
                self._following(reply)

    def _following(self, reply: Reply) -> list[int] | None:
        """The tokens of an environment's turns; None if the template refuses them."""
        try:
            return following(self._tokenizer, reply.turns or [])
        except ConfigError as error:
            self._pool.failed(self._name, "raised", "; ".join(error.faults))
            return None
