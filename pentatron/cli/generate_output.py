"""Encodes prompts to token ids, and prints generated texts as text or JSON."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pentatron.cli.generate import PromptOptions
from pentatron.cli.output import print_note, say_json_rows, show_generated
from pentatron.data.tokenizer import FileTokenizer, Tokenizer
from pentatron.errors import UserError
from pentatron.generate.continue_text import NewText, Text
from pentatron.generate.generate import check_prompts
from pentatron.generate.source import ModelSource


class PromptTexts:
    """Prompts with their token ids (`ids`) and the stop tokens (`stop`); prints the generated texts.

    `prompts` are texts or, with `--tokens`, token ids.
    """

    def __init__(self, prompts: Sequence[Any], options: PromptOptions, source: ModelSource) -> None:
        self.prompts, self.as_tokens = prompts, options.tokens is not None
        self.tokenizer = self._find_tokenizer(source, options.tokenizer_model)
        self.positions = source.model.max_position_embeddings
        if self.tokenizer is None and not self.as_tokens:
            ways = "give one with --tokenizer-model DIR, or token ids with --tokens 1,2,3"
            raise UserError(f"{source.folder} has no tokenizer; {ways}")
        # An empty prompt is continued from the end-of-document token.
        end: list[int] = []
        try:
            end += [] if self.tokenizer is None else [self.tokenizer.eod]
        except UserError as error:
            print_note(f"generation stops only at --max-new-tokens: {error}")
        self.stop = source.stop or frozenset(end)
        self.ids = [prompt if self.as_tokens else self._encoded(prompt, source) or end for prompt in prompts]
        check_prompts(self.ids, source.model.vocab_size, self.positions)

    def _find_tokenizer(self, source: ModelSource, named: str | None) -> Tokenizer | None:
        try:
            return FileTokenizer(Path(named)) if named else source.tokenizer()
        except UserError as error:
            if not self.as_tokens:
                raise
            print_note(f"tokens are not shown as text: {error}")
        return None

    def _encoded(self, prompt: str, source: ModelSource) -> list[int]:
        assert self.tokenizer is not None
        if source.follows_file and isinstance(self.tokenizer, FileTokenizer):
            return self.tokenizer.encode_with_special_tokens(prompt)
        return self.tokenizer.encode(prompt)

    def show(self, updates: Iterable[tuple[int, Text]], as_json: bool) -> None:
        """Prints texts while they are generated.

        A single text is streamed. Several are printed in the order of their prompts, each once it is
        complete.
        """
        if as_json:
            texts = dict(updates)
            say_json_rows(self._data(number, texts[number]) for number in sorted(texts))
        elif len(self.prompts) == 1:
            self._stream(updates)
        else:
            texts, complete = {}, 0
            for number, text in updates:
                texts[number] = text
                while complete in texts and texts[complete].end is not None:
                    self._print_complete(complete, texts[complete])
                    complete += 1

    def _stream(self, updates: Iterable[tuple[int, Text]]) -> None:
        show_generated(self._prompt(0))
        text, shown = None, NewText(self.tokenizer) if self.tokenizer is not None else None
        for _, text in updates:
            if not self.as_tokens and shown is not None:
                show_generated(shown.more(text))
            elif text.end != "stop":
                show_generated(f",{text.tokens[-1]}")
        self._end_text("", text)

    def _print_complete(self, number: int, text: Text) -> None:
        show_generated(f"--- prompt {number + 1} of {len(self.prompts)} ---\n{self._prompt(number)}")
        if self.tokenizer is not None and not self.as_tokens:
            show_generated(text.decoded(self.tokenizer))
        else:
            show_generated("".join(f",{token}" for token in text.tokens))
        self._end_text(f" of prompt {number + 1}", text)

    def _prompt(self, number: int) -> str:
        prompt = self.prompts[number]
        return ",".join(map(str, prompt)) if self.as_tokens else str(prompt)

    def _end_text(self, which: str, text: Text | None) -> None:
        show_generated("\n")
        if text is not None and text.end == "positions":
            print_note(f"the text{which} ends here: the model has {self.positions} positions")

    def _data(self, number: int, text: Text) -> dict[str, Any]:
        decoded = None if self.tokenizer is None else text.decoded(self.tokenizer)
        rest = {"tokens": text.tokens, "logprobs": text.logprobs, "end": text.end}
        return {"prompt": self.prompts[number], "text": decoded, **rest}
