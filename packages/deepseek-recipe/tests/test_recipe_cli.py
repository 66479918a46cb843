"""The command: filters over all golden rows, single requests, bad input, the coloured view."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepseek_recipe.cli import main

V41_NAMES = {"<｜System｜>": 128799, "<｜image｜>": 129264, "<｜image2｜>": 129279}

# Golden rows that we answer otherwise, all of them flagged there as the peer's quirks.
DIFFERENT_REQUESTS = {
    "chat/reminder-consecutive/v41": "every reminder is rendered; the peer loses the second",
    "chat/file-part/v41": "the error says that file parts are not supported, which is the reason",
    "chat/ok-unknown-fields/v4": "`max_completion_tokens` is honoured",
    "chat/ok-unknown-fields/v41": "`max_completion_tokens` is honoured",
    "responses/custom-other/v4": "any custom tool is accepted, not `apply_patch` alone",
    "messages/choice-any/v4": "`any` forces a call",
}
DIFFERENT_REPLIES = {
    "chat/dsml-false-broken/v41": "a value that is not JSON becomes a string",
    "chat/dsml-name-spaces-chars/v41": "a parameter's name may have blanks",
    "chat/dsml-name-spaces-tokens/v41": "a parameter's name may have blanks",
    "chat/dsml-dup-param/v41": "of two parameters of one name the first counts",
    "chat/dsml-empty-name/v41": "a call without a name is none",
    "chat/dsml-invoke-unclosed/v41": "a call that begins inside another one is a call",
    "chat/prefix-nothink/v41": "a continued content keeps its newlines",
    "chat/json-then-tool/v41": "a tool block behind JSON is read, not leaked",
    "responses/apply-patch-trunc/v41": "a cut-off custom call shows its text, not JSON",
}
# Rows that succeed with `ignore` and are refused with `reject`: what the error names.
REFUSED = {
    "chat/ok-limits/v4": "presence_penalty",
    "chat/ok-limits/v41": "presence_penalty",
    "chat/ok-unknown-fields/v4": "`foo`",
    "chat/ok-unknown-fields/v41": "`foo`",
    "chat/tool-extra-fields/v4": "tools[0].function.foo",
    "responses/items-ignored/v4": "item_reference",
    "responses/limits/v4": "store",
    "responses/limits/v41": "store",
    "responses/tools-ignored-kinds/v4": "file_search",
    "responses/tool-search/v4": "tool_search",
    "responses/tool-search-result-ns/v4": "tool_search",
    "responses/tool-search-server/v41": "tool_search",
    "messages/tool-strict-ignored/v4": "strict",
    "messages/sampling/v41": "top_k",
}

Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run the command: status, and output as text or parsed (`lines` for JSON lines)."""

    def call(*arguments: str, stdin: bytes | object = b"", form: str = "json") -> tuple[int, Any]:
        data = stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        status = main(arguments)
        out = capsysbinary.readouterr().out.decode()
        if form == "text":
            return status, out
        lines = [json.loads(line) for line in out.split("\n") if line]
        return status, lines if form == "lines" else lines[0]

    return call


@pytest.fixture(scope="session")
def token_map(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with the names that V4.1 gives to tokens of the packaged vocabulary."""
    path = tmp_path_factory.mktemp("map") / "map.json"
    path.write_text(json.dumps(V41_NAMES), encoding="utf-8")
    return str(path)


def request_faults(golden: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    error = golden["error"]
    if (error is None) != ("error" not in ours):
        return ["error"]
    if error is None:
        found = [
            key
            for key in ("prompt", "token_ids", "special_tokens")
            if key in golden and golden[key] != ours[key]
        ]
        found += [
            key
            for key in ("inference_options", "parsing_options")
            if json.loads(json.dumps(golden[key])) != ours[key]
        ]
        if "prompt_sha256" in golden:
            ids = ",".join(map(str, ours["token_ids"]))
            for key, text in (("prompt_sha256", ours["prompt"]), ("token_ids_sha256", ids)):
                if hashlib.sha256(text.encode()).hexdigest() != golden[key]:
                    found.append(key)
        return found
    if error["stage"] != ours["error"]["stage"]:
        return ["stage"]
    if error["stage"] == "parse":
        return []
    body = ours["error"]["body"]
    if golden["protocol"] == "messages":
        expected = {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": error["message"]},
        }
        return [] if body == expected and ours["error"]["status_code"] == 400 else ["body"]
    return [] if body == error["body"] and ours["error"]["status_code"] == 400 else ["body"]


def test_requests_equal_the_golden_ones(
    run: Run, token_map: str, golden_rows: Callable[[str], list[dict[str, Any]]]
) -> None:
    rows = golden_rows("requests")
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    flags = ("render", "--jsonl", "--unsupported", "ignore", "--token-map", token_map)
    status, lines = run(*flags, stdin=text, form="lines")
    assert status == 2  # some of them are errors
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    different = {
        row["id"] for row, line in zip(rows, lines, strict=True) if request_faults(row, line)
    }
    assert different == DIFFERENT_REQUESTS.keys()
    assert all(row.get("quirk") for row in rows if row["id"] in different)


def test_rejecting_refuses_exactly_the_rows_with_something_unsupported(
    run: Run, token_map: str, golden_rows: Callable[[str], list[dict[str, Any]]]
) -> None:
    rows = golden_rows("requests")
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    _, ignoring = run(
        *("render", "--jsonl", "--unsupported", "ignore", "--token-map", token_map),
        stdin=text,
        form="lines",
    )
    _, rejecting = run("render", "--jsonl", "--token-map", token_map, stdin=text, form="lines")
    refused = {}
    for ignored, rejected in zip(ignoring, rejecting, strict=True):
        if "error" in rejected and "error" not in ignored:
            refused[rejected["id"]] = rejected["error"]["body"]["error"]["message"]
            assert ignored["left_out"]
        elif "error" not in rejected:
            left_out = ignored.pop("left_out", None)  # what a server's option drops
            assert rejected.pop("left_out", None) == left_out
            assert rejected == ignored
    assert refused.keys() == REFUSED.keys()
    assert {name for name, message in refused.items() if REFUSED[name] not in message} == set()


def neutral(value: object) -> Any:
    """Return a JSON value with the ids of calls and times as the golden files have them."""
    text = json.dumps(value, ensure_ascii=False)
    text = re.sub(r"call_(\d\d)_[A-Za-z0-9*]+", r"call_\1_*", text)
    return json.loads(re.sub(r'"(created|created_at|completed_at)": \d+', r'"\1": 0', text))


def test_replies_equal_the_golden_ones(
    run: Run, token_map: str, golden_rows: Callable[[str], list[dict[str, Any]]]
) -> None:
    rows = golden_rows("streams")
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    flags = ("parse", "--jsonl", "--unsupported", "ignore", "--token-map", token_map)
    _, lines = run(*flags, stdin=text, form="lines")
    different = set()
    for row, line in zip(rows, lines, strict=True):
        assert line["id"] == row["id"]
        same = line.get("error") == row["error"]
        if row["error"] is None:
            same = same and line["done_data"] == row["done_data"]
            same = same and neutral(line["response"]) == neutral(row["response"])
        if not same:
            different.add(row["id"])
    assert different == DIFFERENT_REPLIES.keys()
    assert all(row.get("quirk") for row in rows if row["id"] in different)


def test_a_filter_depends_on_its_input_alone(
    run: Run, token_map: str, golden_rows: Callable[[str], list[dict[str, Any]]]
) -> None:
    row = next(row for row in golden_rows("streams") if row["id"] == "messages/tool/v41")
    flags = ("parse", "--jsonl", "--token-map", token_map)
    assert run(*flags, stdin=row) == run(*flags, stdin=row)
    calls = re.findall(r"call_\w+", json.dumps(run(*flags, stdin=row)))
    assert calls and all(re.fullmatch(r"call_\d\d_[0-9a-zA-Z]{20}\d{4}", each) for each in calls)


CHAT = {
    "model": "DeepSeek-V4-Pro",
    "messages": [{"role": "user", "content": "Hi <｜User｜>"}],
    "thinking": {"type": "disabled"},
}
V4 = ("--protocol", "chat", "--profile", "v4")


def test_render_prints_prompt_ids_ranges_settings_and_parsing(run: Run) -> None:
    status, answer = run("render", *V4, stdin=CHAT)
    assert status == 0
    assert list(answer) == ["prompt", "token_ids", "special_ranges", "settings", "parsing"]
    for each in answer["special_ranges"]:
        assert answer["prompt"][each["start"] : each["end"]] == each["token"]
        assert each["id"] in answer["token_ids"]
    names = [each["token"] for each in answer["special_ranges"]]
    assert names == ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"]


def test_what_golden_lines_lack_of_a_constraint_stands_beside_it(run: Run) -> None:
    inner = {"type": "object", "properties": {"a": {"$ref": "#/$defs/R"}}}
    parameters = {**inner, "$defs": {"R": {"type": "string"}}}
    function = {"name": "f", "strict": True, "parameters": parameters}
    body = {**CHAT, "tools": [{"type": "function", "function": function}]}
    line = {"protocol": "chat", "version": "v4", "request": body}
    _, answer = run("render", "--jsonl", stdin=line)
    definitions = {
        "definitions": '{"f":{"$defs":{"R":{"type":"string"}}}}',
        "exact": '{"f":{"type":"object","properties":{"a":{"$ref":"#/$defs/R"}},'
        '"$defs":{"R":{"type":"string"}},"additionalProperties":false,"required":["a"]}}',
    }
    assert list(answer["inference_options"]["output_constraint"]) == ["kind", "schema"]
    assert answer["constraint"] == definitions
    body["parallel_tool_calls"] = False
    _, answer = run("render", "--jsonl", stdin=line)
    assert answer["constraint"] == {"parallel": False, **definitions}
    _, answer = run("render", *V4, stdin=body)
    assert answer["settings"]["output_constraint"]["parallel"] is False


def test_a_model_of_ones_own_has_the_profile_of_the_flag(run: Run) -> None:
    named = run("render", *V4, stdin={**CHAT, "model": "mine"})
    assert named == run("render", *V4, stdin=CHAT)


def test_what_has_no_effect_is_listed(run: Run) -> None:
    body = {**CHAT, "thinking": {"type": "enabled"}, "temperature": 0.5, "top_p": 1, "x": 1}
    _, answer = run("render", *V4, "--unsupported", "ignore", stdin=body)
    assert answer["overridden"] == ["temperature"] and answer["left_out"] == ["x"]


def test_parse_counts_the_prompt_itself(run: Run) -> None:
    _, rendered = run("render", *V4, stdin=CHAT)
    _, answer = run("parse", *V4, stdin={"request": CHAT, "text": "Hello"})
    assert answer["response"]["usage"]["prompt_tokens"] == len(rendered["token_ids"])


def test_tokenize_prints_ids_and_their_texts(run: Run) -> None:
    status, answer = run("tokenize", *V4, stdin=CHAT)
    assert status == 0 and answer["num_tokens"] == len(answer["token_ids"]) == len(answer["tokens"])
    assert "".join(answer["tokens"]) == (
        "<｜begin▁of▁sentence｜><｜User｜>Hi <｜User｜><｜Assistant｜></think>"
    )


@pytest.mark.parametrize("verb", ["render", "tokenize"])
def test_pretty_colours_special_tokens_and_nothing_that_looks_like_one(run: Run, verb: str) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "a <｜User｜> \x1b[31m"}]}
    status, view = run(verb, *V4, "--pretty", stdin=body, form="text")
    assert status == 0
    assert view.count("\x1b[1;30;46m<｜User｜>\x1b[0m") == 1
    assert "\x1b[31m" not in view


def test_parse_reads_text_ids_and_chunks_alike(run: Run) -> None:
    text = {"request": CHAT, "text": "Hello", "prompt_tokens": 5}
    ids = {"request": CHAT, "token_ids": [19923], "prompt_tokens": 5}
    chunks = [
        {"kind": "ready", "prompt_tokens": 5},
        {"kind": "tokens", "ids": [19923]},
        {"kind": "finish", "reason": "stop"},
    ]
    answers = [
        run("parse", *V4, stdin=each)
        for each in (text, ids, {"request": CHAT, "model_output_chunks": chunks})
    ]
    assert answers[0] == answers[1] == answers[2]
    status, answer = answers[0]
    assert status == 0 and answer["done_data"] == "[DONE]"
    assert answer["response"]["choices"][0]["message"]["content"] == "Hello"
    assert answer["response"]["usage"]["completion_tokens"] == 1


def test_parse_reads_a_raw_body_like_a_request(run: Run) -> None:
    raw = run("parse", *V4, stdin={"request_body": json.dumps(CHAT), "text": "Hello"})
    assert raw == run("parse", *V4, stdin={"request": CHAT, "text": "Hello"})
    assert raw[0] == 0


def test_parse_shows_what_was_malformed(run: Run) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    reply = "\n\n<｜DSML｜tool_calls>\nnoise</｜DSML｜tool_calls>"
    status, answer = run("parse", *V4, stdin={"request": {**CHAT, "tools": tools}, "text": reply})
    assert status == 0
    assert "noise" in answer["malformed"][0]["text"]
    assert answer["response"]["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("profile", ["v4", "v41"])
def test_defaults_need_no_input(run: Run, profile: str) -> None:
    status, answer = run("defaults", "--profile", profile)
    assert status == 0 and answer["profile"] == profile
    assert {mode["max_tokens"] for mode in answer["settings"]} == {8192, 65536, 131072}
    assert answer["conversion_options"]["unsupported"] == "reject"


# bad input


@pytest.mark.parametrize(
    ("verb", "stdin", "stage", "word"),
    [
        ("render", b"", "parse", "JSON"),
        ("render", b"{", "parse", "JSON"),
        ("render", b"[]", "parse", "object"),
        ("render", b'"\xff"', "parse", "JSON"),
        ("render", b"[" * 100_000, "parse", "JSON"),
        ("render", {"messages": []}, "parse", "model"),
        ("render", {**CHAT, "colour": 1}, "convert", "colour"),
        ("render", {**CHAT, "model": "DeepSeek-V4.1-Flash"}, "input", "profile"),
        ("parse", {"request": CHAT}, "parse", "nothing"),
        ("parse", {"request": CHAT, "text": "a", "token_ids": [1]}, "parse", "text"),
        ("parse", {"request": CHAT, "text": 3}, "parse", "text"),
        ("parse", {"request": 3, "text": ""}, "parse", "request"),
        ("parse", {"request": CHAT, "token_ids": [10**9]}, "input", "1000000000"),
        ("parse", {"request": CHAT, "token_ids": "abc"}, "parse", "ids"),
        ("parse", {"request": CHAT, "text": "", "finish_reason": "x"}, "parse", "finish_reason"),
        ("parse", {"request": CHAT, "text": "", "prompt_tokens": -1}, "parse", "prompt_tokens"),
        ("parse", {"request": CHAT, "model_output_chunks": [{"kind": "x"}]}, "parse", "kind"),
        ("parse", {"request": CHAT, "model_output_chunks": [{"kind": []}]}, "parse", "kind"),
        (
            "parse",
            {"request": CHAT, "model_output_chunks": [], "finish_reason": "length"},
            "parse",
            "finish_reason",
        ),
        ("parse", {"request": CHAT, "request_body": "{}", "text": ""}, "parse", "request_body"),
        ("parse", {"request": CHAT, "text": "", "protocol": "messages"}, "input", "messages"),
        ("parse", {"request": CHAT, "text": "", "version": "v41"}, "input", "v41"),
        ("parse", {"request": CHAT, "text": "", "version": ["v4"]}, "input", "version"),
        ("parse", {"request": CHAT, "text": "", "echo": "false"}, "parse", "echo"),
        ("parse", {"request": CHAT, "text": "", "tokenizer": "no"}, "parse", "tokenizer"),
        ("parse", {"request": CHAT, "text": "", "signature": 5}, "parse", "signature"),
        ("parse", {"request": CHAT, "text": "", "options": {"models": "abc"}}, "parse", "models"),
        ("parse", {"request": CHAT, "text": "", "options": {"colour": 1}}, "input", "colour"),
        (
            "parse",
            {"request": {**CHAT, "max_tokens": 9}, "text": "", "options": {"max_tokens_bound": 5}},
            "convert",
            "max_tokens",
        ),
        (
            "parse",
            {"request": {**CHAT, "user": {"$repeat": ["a", True]}}, "text": ""},
            "parse",
            "$repeat",
        ),
    ],
)
def test_bad_input_is_one_json_error_and_status_2(
    run: Run, verb: str, stdin: object, stage: str, word: str
) -> None:
    status, lines = run(verb, *V4, stdin=stdin, form="lines")
    assert status == 2 and len(lines) == 1 and lines[0].keys() == {"error"}
    assert lines[0]["error"]["stage"] == stage
    assert word in json.dumps(lines[0])


def test_a_bad_line_does_not_end_the_filter(run: Run) -> None:
    good = {"protocol": "chat", "version": "v4", "request": CHAT}
    lines = [{}, {**good, "protocol": "x"}, {**good, "options": {"colour": 1}}, good]
    text = b"{\n\n" + b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    status, answers = run("render", "--jsonl", stdin=text, form="lines")
    assert status == 2
    assert ["error" in answer for answer in answers] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("chunk", "word"),
    [
        ({"kind": "tokens", "ids": [19923], "logprobs": [[True, []]]}, "logprobs[0]"),
        ({"kind": "tokens", "ids": [19923], "logprobs": [[-1, [[True, -1]]]]}, "logprobs[0]"),
        ({"kind": "tokens", "ids": [19923], "logprobs": [[-1, [[5, False]]]]}, "logprobs[0]"),
        ({"kind": "tokens", "ids": [True]}, "ids"),
        ({"kind": "tokens", "ids": [], "text": "a"}, "`model_output_chunks[0].text` is unknown"),
        ({"kind": "text", "text": "a", "n": 1, "N": 1}, "`model_output_chunks[0].N` is unknown"),
        ({"kind": "ready", "cached": 1}, "`model_output_chunks[0].cached` is unknown"),
        ({"kind": "ready", "prompt_tokens": 1, "cache_hit": 2}, "cached tokens"),
        ({"kind": "finish", "reason": ["stop"]}, "reason"),
    ],
)
def test_a_bad_chunk_is_named(run: Run, chunk: dict[str, Any], word: str) -> None:
    body = {"request": CHAT, "model_output_chunks": [chunk]}
    status, answer = run("parse", *V4, stdin=body)
    assert status == 2 and word in json.dumps(answer)


@pytest.mark.parametrize(
    "fields",
    [
        {"version": ["v4"]},
        {"version": {}},
        {"protocol": ["chat"]},
        {"options": []},
        {"options": {"models": "abc"}},
        {"options": {"models": [1]}},
        {"options": {"models": "abc", "aliases": {"a": "v4"}}},
        {"options": {"models": {"a": ["v4"]}}},
        {"options": {"aliases": [1]}},
        {"options": {"missing_reasoning": {}}},
        {"options": {"max_tokens_bound": []}},
        {"request": "x"},
        {"request_body": "{}"},
    ],
)
@pytest.mark.parametrize("verb", ["render", "parse"])
def test_a_field_of_a_line_with_a_wrong_type_is_an_error(
    run: Run, verb: str, fields: dict[str, Any]
) -> None:
    line = {"protocol": "chat", "version": "v4", "request": CHAT, "model_output_chunks": []}
    status, answer = run(verb, "--jsonl", stdin={**line, **fields})
    text = json.dumps(answer)
    assert status == 2 and ("allowed" in text or "one of them" in text)


def test_options_of_the_input_and_unknown_keys_of_a_line_are_fine(run: Run) -> None:
    body = {"request": {**CHAT, "model": "mine"}, "text": "a", "events": [], "version": "v4"}
    options = {"models": {"mine": "v4"}, "aliases": {"other": "v4"}}
    assert run("parse", *V4, stdin={**body, "options": options})[0] == 0
    line = {**body, "protocol": "chat", "options": options}
    assert run("render", "--jsonl", stdin=line)[0] == 0


STREAMS = [
    (">/dev/full", 1, "standard output cannot be written"),
    (">&-", 1, "standard output is closed"),
    ("<&-", 2, "standard input is closed"),
    ("0>/dev/null", 2, "standard input cannot be read"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a shell and /dev/full")
@pytest.mark.parametrize(
    ("verb", "redirection", "status", "message"),
    [
        (verb, *stream)
        for verb in ("render --protocol chat --profile v4", "render --jsonl", "")
        for stream in STREAMS
        if verb or "input" not in stream[2]  # help needs no input
    ],
)
def test_what_cannot_be_read_or_written_is_one_message(
    tmp_path: Path, verb: str, redirection: str, status: int, message: str
) -> None:
    path = tmp_path / "in.json"
    path.write_text(json.dumps(CHAT), encoding="utf-8")
    source = "" if "input" in message else f"<{path}"
    command = f"{sys.executable} -m deepseek_recipe {verb} {source} {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == status
    (line,) = done.stderr.splitlines()
    assert line.startswith("deepseek-recipe: ") and message in line


def test_repeated_text_is_bounded(run: Run) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": {"$repeat": ["ab", 10**9]}}]}
    line = {"protocol": "chat", "version": "v4", "request": body}
    status, answer = run("render", "--jsonl", stdin=line)
    assert status == 2 and "$repeat" in json.dumps(answer)


def test_v41_needs_its_own_names(run: Run) -> None:
    body = {"model": "DeepSeek-V4.1-Flash", "messages": CHAT["messages"]}
    status, answer = run("render", "--protocol", "chat", "--profile", "v41", stdin=body)
    assert status == 2
    assert answer["error"]["stage"] == "tokenizer" and "<｜System｜>" in json.dumps(
        answer, ensure_ascii=False
    )


@pytest.mark.parametrize("content", ["{", "[]", '{"<｜x｜>": "y"}', '{"<｜x｜>": 3}'])
def test_a_bad_token_map_is_named(run: Run, tmp_path: Path, content: str) -> None:
    path = tmp_path / "map.json"
    path.write_text(content, encoding="utf-8")
    status, answer = run("render", *V4, "--token-map", str(path), stdin=CHAT)
    assert status == 2 and answer["error"]["stage"] == "tokenizer"


def test_a_missing_tokenizer_is_named(run: Run, tmp_path: Path) -> None:
    status, answer = run("render", *V4, "--tokenizer", str(tmp_path / "no.json"), stdin=CHAT)
    assert status == 2 and "no.json" in json.dumps(answer)


@pytest.mark.parametrize(
    "arguments",
    [
        ("render",),
        ("render", "--protocol", "chat"),
        ("render", "--jsonl", "--profile", "v4"),
        ("render", "--jsonl", "--pretty"),
        ("parse", "--jsonl", "--protocol", "chat"),
        ("render", "--protocol", "telegraph", "--profile", "v4"),
        ("defaults",),
        ("dance",),
    ],
)
def test_contradicting_flags_end_with_usage(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_no_verb_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "render" in capsys.readouterr().out
