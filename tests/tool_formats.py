"""How models write calls of tools, by the name of SGLang's parser, and such answers' tokens."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

Call = tuple[str, dict[str, Any]]  # a tool's name, its arguments


class Format(NamedTuple):
    """How a model writes calls; `{name}`, `{args}` (JSON), `{pairs}` and `{i}` are filled in."""

    call: str
    begin: str = ""
    between: str = ""
    end: str = ""
    pair: str = ""  # of an argument, with `{key}`, `{value}` and whether it is a string, `{string}`
    between_pairs: str = ""
    alone: bool = False  # whether an answer has one call at most, and no text behind it
    text: str = "{text}"  # of text before calls; empty where a model writes none


_JSON = '{{"name": "{name}", "arguments": {args}}}'
_PARAMETERS = '{{"name": "{name}", "parameters": {args}}}'
_GLM = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
_GLM_47 = "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
_QWEN_3 = "<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"
_QWEN_3_PAIR = "<parameter={key}>\n{value}\n</parameter>\n"
_INVOKE = '<invoke name="{name}">\n{pairs}</invoke>\n'
_INVOKE_PAIR = '<parameter name="{key}">{value}</parameter>\n'
_PYTHONIC_PAIR = "{key}={literal}"


def _dsml(block: str, space: str = "") -> Format:
    mark = f"｜DSML｜{space}"
    invoke = f'<{mark}invoke name="{{name}}">\n{{pairs}}</{mark}invoke>\n'
    pair = f'<{mark}parameter name="{{key}}" string="{{string}}">{{value}}</{mark}parameter>\n'
    return Format(invoke, begin=f"<{mark}{block}>\n", end=f"</{mark}{block}>", pair=pair)


_HERMES = Format(f"<tool_call>{_JSON}</tool_call>", between="\n")
_QWEN = Format(f"<tool_call>\n{_JSON}\n</tool_call>", between="\n")
_GLM_45 = Format("<tool_call>{name}\n{pairs}</tool_call>", between="\n", pair=_GLM)
_CODER = Format(_QWEN_3, between="\n", pair=_QWEN_3_PAIR)
_MINIMAX = "]<]minimax[>["

# fmt: off
FORMATS = {
    "apertus2509": Format('{{"{name}": {args}}}', "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    "beam": Format(" to={name}<|channel|>analysis <|constrain|>xml<|message|>{pairs}",
        between="<|end|><|start|>assistant", end="<|call|>",
        pair='<rfl:parameter name="{key}">\n{value}\n</rfl:parameter>', alone=True, text=""),
    "cohere_command4":
        Format('{{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {args}}}',
        "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
    "deepseekv3":
        Format("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{args}\n```"
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseekv31": Format("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "deepseekv41": _dsml("calls", " "),
    "dots": Format(_INVOKE, "<dots_function_call>\n", "", "</dots_function_call>",
        pair=_INVOKE_PAIR),
    "glm": _GLM_45,
    "glm45": _GLM_45,
    "glm47": Format("<tool_call>{name}{pairs}</tool_call>", pair=_GLM_47),
    "gpt-oss": Format("<|start|>assistant<|channel|>commentary to=functions.{name}"
        "<|constrain|>json<|message|>{args}<|call|>",
        text="<|channel|>commentary<|message|>{text}<|end|>"),
    "k2_horizon":
        Format('<ifm|tool_call>{{"name": "{name}", "arguments": {args}}}</ifm|tool_call>\n',
        "<ifm|tool_calls>\n", "", "</ifm|tool_calls>"),
    "kimi_k2":
        Format("<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{args}"
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "kimi_k3": Format('<|open|>call tool="{name}" index="{i}"<|sep|>{pairs}<|close|>call<|sep|>',
        "<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>",
        pair='<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'),
    "lfm2": Format("{name}({pairs})", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>",
        pair=_PYTHONIC_PAIR, between_pairs=", "),
    "ling3": _GLM_45,
    "llama3": Format(_PARAMETERS, "<|python_tag|>", ";"),
    "mimo": Format("<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>",
        between="\n", pair="<parameter={key}>{value}</parameter>\n"),
    "minicpm5": Format('<function name="{name}">{pairs}</function>', between="\n",
        pair='<param name="{key}">{value}</param>'),
    "mistral": Format(_JSON, "[TOOL_CALLS] [", ", ", "]"),
    "muse": Format('<atem:invoke name="{name}">\n{pairs}</atem:invoke>\n',
        "to=functions<|message|><atem:function_calls>\n", "", "</atem:function_calls><|eot|>",
        pair='<atem:parameter name="{key}">{value}</atem:parameter>\n', text=""),
    "poolside_v1": _GLM_45,
    "pythonic": Format("{name}({pairs})", "[", ", ", "]", pair=_PYTHONIC_PAIR, between_pairs=", "),
    "qwen": _QWEN,
    "qwen25": _QWEN,
    "qwen3_coder": _CODER,
    "spark25": Format("<tool_call>{name}\n{pairs}\n</tool_call>", between="\n", pair=_GLM_47),
    "step3":
        Format('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n{pairs}'
        "</steptml:invoke><｜tool_call_end｜>\n",
        "<｜tool_calls_begin｜>\n", "", "<｜tool_calls_end｜>",
        pair='<steptml:parameter name="{key}">{value}</steptml:parameter>\n'),
    "step3p5": _CODER,
    "minimax-m2": Format(_INVOKE, "<minimax:tool_call>\n", "", "</minimax:tool_call>",
        pair=_INVOKE_PAIR),
    "minimax-m3": Format(f'{_MINIMAX}<invoke name="{{name}}">{{pairs}}{_MINIMAX}</invoke>',
        f"{_MINIMAX}<tool_call>", "", f"{_MINIMAX}</tool_call>",
        pair=f"{_MINIMAX}<{{key}}>{{value}}{_MINIMAX}</{{key}}>"),
    "nanbeige": _CODER,
    "trinity": _QWEN,
    "interns1": Format(f"<|action_start|> <|plugin|>\n{_PARAMETERS}<|action_end|>", between=""),
    "hermes": _HERMES,
    "hunyuan": Format("<tool_call>{name}<tool_sep>\n{pairs}</tool_call>\n", "<tool_calls>\n", "",
        "</tool_calls>", pair=_GLM),
    "gigachat3": Format(_JSON, "<|function_call|>", alone=True),
    "gigachat35": Format('<｜GCML｜invoke name="{name}">\n{pairs}</｜GCML｜invoke>\n',
        "<｜GCML｜tool_calls>\n", "", "</｜GCML｜tool_calls>",
        pair='<｜GCML｜parameter name="{key}" string="{string}">{value}</｜GCML｜parameter>\n'),
    "gemma4": Format("<|tool_call>call:{name}{{{pairs}}}<tool_call|>", pair="{key}:{quoted}",
        between_pairs=","),
    "inkling":
        Format('<|message_model|>{name}<|content_invoke_tool_json|>{{"name":"{name}","args":{args}}}'
        "<|end_message|>"),
    "iquest_q1": Format("<iquest_tool_call>{name}{pairs}</iquest_tool_call>", pair=_GLM_47),
}
# fmt: on


# A marker, as the vocabularies of these models have it; else up to four letters behind a space.
_TOKEN = re.compile(
    r"\]<\]minimax\[>\[|｜[A-Z]{4}｜|\[TOOL_CALLS\]"
    r"|<(?!/?｜[A-Z])/?[｜|]?[^<>\s=]+(?:[ =][^<>\s]+)?>| ?\w{1,4}|\s+|[^\w\s]"
)


def answer(parser: str, calls: Sequence[Call], before: str = "", behind: str = "") -> str:
    """Return an answer as a model of a parser writes it, with text before and behind its calls."""
    form = FORMATS[parser]
    written = (_written(form, i, *call) for i, call in enumerate(calls))
    before = form.text.format(text=before) if before else ""
    return before + form.begin + form.between.join(written) + form.end + behind


def _written(form: Format, i: int, name: str, arguments: dict[str, Any]) -> str:
    pairs = form.between_pairs.join(
        form.pair.format(
            key=key,
            value=value,
            string=str(isinstance(value, str)).lower(),
            kind="string" if isinstance(value, str) else "number",
            literal=repr(value),
            quoted=f'<|"|>{value}<|"|>' if isinstance(value, str) else value,
        )
        for key, value in arguments.items()
    )
    return form.call.format(name=name, args=json.dumps(arguments), pairs=pairs, i=i)


def tokens_of(text: str) -> list[str]:
    """Return a text in pieces as long as tokens: markers whole, words in pieces of 4 letters."""
    return _TOKEN.findall(text)
