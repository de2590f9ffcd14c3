"""Templates: prompt and answer from a row's columns, with sandboxed Jinja."""

from collections.abc import Mapping, Sequence
from typing import Any

from plugins.data.errors import DataError
from plugins.data.rows import Rows, Work
from runspec.hints import nearest


def template(rows: Rows, work: Work) -> Rows:
    """Set the prompt, the answer and a system message, as far as they are given.

    A template may use each column of a row, `text`, and `messages` as a list.
    """
    if faults := template_faults(work.options, rows.table.columns, work.where):
        raise DataError(*faults, exit_code=2)
    options = {"templates": _given(work.options), "where": work.where}
    return work.map(rows, "rendered", "plugins.data.steps.templates:render", options)


def _given(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(text) for name, text in options.items() if text is not None}


def template_faults(options: Mapping[str, Any], columns: Sequence[str], where: str) -> list[str]:
    """Return the faults of templates for rows with these columns."""
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.sandbox import SandboxedEnvironment

    templates = _given(options)
    known = [*(name for name in columns if name != "_id"), "text"]
    faults = []
    for name, text in templates.items():
        try:
            environment = SandboxedEnvironment()
            used = meta.find_undeclared_variables(environment.parse(text))
        except TemplateSyntaxError as error:
            faults.append(f"{where}.{name}, line {error.lineno}: {error.message}: fix the template")
            continue
        faults += [
            f"{where}.{name}: the template uses the unknown field {field!r}"
            f"{nearest(field, known)}; there are {', '.join(known)}"
            for field in sorted(used - set(known) - set(environment.globals))
        ]
    return faults if templates else [f"{where}: give prompt, answer or system"]


# Arrow function ------------------------------------------------------------------------------


def render(table: Any, templates: Mapping[str, str], where: str) -> Any:
    """Return the rows with rendered prompt and answer, and messages if they have more turns."""
    import json

    import pyarrow as pa
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from plugins.data.formats import encode
    from plugins.data.text import with_column

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    made = {name: environment.from_string(text) for name, text in templates.items()}
    prompts, answers, messages = [], [], []
    for row in table.to_pylist():
        turns = json.loads(row["messages"]) if row["messages"] else None
        prompt, answer = row["prompt"], row["answer"]
        text = answer if prompt is None else f"{prompt}\n{answer}"
        fields = {**row, "messages": turns, "text": text}
        try:
            new = {name: each.render(fields) for name, each in made.items()}
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise DataError(f"{where}: row {row['_id']}: {error}: fix the template") from None
        if "prompt" in new:
            # It is the complete prompt: earlier turns are in it, or are dropped.
            turns = None
        prompt, answer = new.get("prompt", prompt), new.get("answer", answer)
        if turns is None and "system" in new:
            turns = [
                {"role": "user", "content": prompt or ""},
                {"role": "assistant", "content": answer},
            ]
        if turns is not None:
            turns[-1] = {**turns[-1], "content": answer}
            if "system" in new:
                turns = [turn for turn in turns if turn["role"] != "system"]
                turns = [{"role": "system", "content": new["system"]}, *turns]
        prompts.append(prompt)
        answers.append(answer)
        messages.append(None if turns is None else encode(turns))
    for name, values in (("prompt", prompts), ("answer", answers), ("messages", messages)):
        table = with_column(table, name, pa.array(values, pa.string()))
    return table
