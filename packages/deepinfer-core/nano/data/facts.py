"""Short facts about this project, each asked in many ways."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from nano.data.example import Draw, Example
from nano.data.question import ask

__all__ = ["FACTS", "TASKS", "Fact"]


@dataclass(frozen=True)
class Fact:
    """An answer, and the questions that it answers."""

    answer: str
    questions: tuple[str, ...]


FACTS: tuple[Fact, ...] = (
    Fact(
        "I am deepinfer-nano, a tiny model that comes with DeepInfer.",
        (
            "Who are you?",
            "What is your name?",
            "What are you?",
            "Tell me who you are.",
            "Introduce yourself.",
            "Which model are you?",
        ),
    ),
    Fact(
        "I have a few million parameters.",
        (
            "How large are you?",
            "How many parameters do you have?",
            "What is your size?",
            "How big is deepinfer-nano?",
            "How many parameters does deepinfer-nano have?",
        ),
    ),
    Fact(
        "I have the DeepSeek-V4.1 architecture in small.",
        (
            "What is your architecture?",
            "Which architecture do you have?",
            "What architecture does deepinfer-nano have?",
            "How are you built?",
        ),
    ),
    Fact(
        "I was trained on made-up questions and on texts of the Python standard library.",
        (
            "What were you trained on?",
            "What is your training data?",
            "Which data was deepinfer-nano trained on?",
            "How were you trained?",
        ),
    ),
    Fact(
        "I can do small sums, sort lists, convert units, call tools and write JSON.",
        (
            "What can you do?",
            "What are you able to do?",
            "How can you help me?",
            "What are your skills?",
        ),
    ),
    Fact(
        "I am very small: I only know what I was trained on, so I am often wrong.",
        (
            "What can't you do?",
            "What are your limits?",
            "Can I trust you?",
            "Are you always right?",
        ),
    ),
    Fact(
        "DeepInfer runs DeepSeek-V4.1-Flash from its released checkpoint format.",
        (
            "What is DeepInfer?",
            "What does DeepInfer do?",
            "Tell me about DeepInfer.",
            "What is DeepInfer for?",
            "Explain DeepInfer in one sentence.",
        ),
    ),
    Fact(
        "DeepInfer runs DeepSeek-V4.1-Flash.",
        (
            "Which model does DeepInfer run?",
            "What model is DeepInfer made for?",
            "Which checkpoint does DeepInfer serve?",
        ),
    ),
    Fact(
        "DeepInfer is under Apache-2.0; deepseek-recipe is under MIT.",
        (
            "What is the licence?",
            "Which licence does DeepInfer have?",
            "Under which licence is DeepInfer released?",
            "What is the license of DeepInfer?",
        ),
    ),
    Fact(
        "deepseek-recipe is under the MIT licence.",
        (
            "Which licence does deepseek-recipe have?",
            "What is the licence of deepseek-recipe?",
            "Under which licence is deepseek-recipe?",
        ),
    ),
    Fact(
        "deepinfer-core, deepinfer-kernels-cuda, deepinfer-kernels-ascend, deepseek-recipe, "
        "deepinfer-eplb and deepinfer-specdec.",
        (
            "Which packages does DeepInfer have?",
            "What are the packages of DeepInfer?",
            "List the packages of DeepInfer.",
            "Name the six packages of DeepInfer.",
        ),
    ),
    Fact(
        "Six.",
        (
            "How many packages does DeepInfer have?",
            "How many packages make up DeepInfer?",
            "What is the number of packages of DeepInfer?",
        ),
    ),
    Fact(
        "deepinfer-core is the engine: model, cache, scheduler, loop and command line.",
        (
            "What is deepinfer-core?",
            "What does deepinfer-core do?",
            "What does the package deepinfer-core hold?",
            "What is deepinfer-core for?",
        ),
    ),
    Fact(
        "deepseek-recipe turns requests into token ids, and token ids into responses.",
        (
            "What is deepseek-recipe?",
            "What does deepseek-recipe do?",
            "What does the package deepseek-recipe hold?",
            "What is deepseek-recipe for?",
        ),
    ),
    Fact(
        "deepinfer-kernels-cuda has the kernels for NVIDIA GPUs.",
        (
            "What is deepinfer-kernels-cuda?",
            "What does deepinfer-kernels-cuda do?",
            "What does the package deepinfer-kernels-cuda hold?",
            "What is deepinfer-kernels-cuda for?",
        ),
    ),
    Fact(
        "deepinfer-kernels-ascend has the kernels for Ascend devices.",
        (
            "What is deepinfer-kernels-ascend?",
            "What does deepinfer-kernels-ascend do?",
            "What does the package deepinfer-kernels-ascend hold?",
            "What is deepinfer-kernels-ascend for?",
        ),
    ),
    Fact(
        "deepinfer-eplb plans where the copies of experts are placed.",
        (
            "What is deepinfer-eplb?",
            "What does deepinfer-eplb do?",
            "What does the package deepinfer-eplb hold?",
            "What is deepinfer-eplb for?",
        ),
    ),
    Fact(
        "deepinfer-specdec accepts or rejects draft tokens for speculative decoding.",
        (
            "What is deepinfer-specdec?",
            "What does deepinfer-specdec do?",
            "What does the package deepinfer-specdec hold?",
            "What is deepinfer-specdec for?",
        ),
    ),
    Fact(
        "SWA, Full, Reindex and Reuse.",
        (
            "Which roles do layers have?",
            "What are the roles of the layers?",
            "Name the layer roles of V4.1.",
            "What kinds of attention layers are there?",
        ),
    ),
    Fact(
        "An SWA layer sees a sliding window of recent tokens.",
        ("What is an SWA layer?", "What does an SWA layer do?", "What does SWA mean?"),
    ),
    Fact(
        "A Full layer makes its own compressed cache and its own index.",
        ("What is a Full layer?", "What does a Full layer do?"),
    ),
    Fact(
        "A Reindex layer chooses anew from the cache of an earlier layer.",
        ("What is a Reindex layer?", "What does a Reindex layer do?"),
    ),
    Fact(
        "A Reuse layer takes the cache and the choice of an earlier layer.",
        ("What is a Reuse layer?", "What does a Reuse layer do?"),
    ),
    Fact(
        "Engram is a table of short phrases that the model looks up by hash.",
        ("What is Engram?", "What does Engram do?", "Explain Engram."),
    ),
    Fact(
        "DSpark is the drafter: it proposes tokens that the model then verifies.",
        ("What is DSpark?", "What does DSpark do?", "Explain DSpark.", "What is the drafter?"),
    ),
    Fact(
        "The drafter proposes 5 tokens at a time.",
        (
            "How many tokens does the drafter propose?",
            "What is the block size of the drafter?",
            "What is the block size of DSpark?",
            "How many tokens does DSpark draft?",
        ),
    ),
    Fact(
        "I have 8 layers.",
        (
            "How many layers do you have?",
            "How many layers does deepinfer-nano have?",
            "What is your number of layers?",
        ),
    ),
    Fact(
        "I have 16 experts, and 2 of them work on each token.",
        (
            "How many experts do you have?",
            "How many experts does deepinfer-nano have?",
            "How many experts work on a token?",
        ),
    ),
    Fact(
        "My vocabulary has 4096 tokens.",
        (
            "How large is your vocabulary?",
            "How many tokens are in your vocabulary?",
            "What is the vocabulary size of deepinfer-nano?",
        ),
    ),
    Fact(
        "My sliding window has 64 tokens.",
        (
            "How long is your sliding window?",
            "What is your window size?",
            "How many tokens does your window hold?",
        ),
    ),
    Fact(
        "Use `deepinfer generate`.",
        (
            "Which command generates text?",
            "How do I generate text from a shell?",
            "What is the command to generate text?",
            "How do I run a prompt from the command line?",
        ),
    ),
    Fact(
        "Use `./dev demo`.",
        (
            "How do I run the demo?",
            "Which command runs the demo?",
            "What is the command for the demo?",
            "How can I see a demo?",
        ),
    ),
    Fact(
        "Use `./dev test`.",
        (
            "How do I run the tests?",
            "Which command runs the tests?",
            "What is the command for the tests?",
        ),
    ),
    Fact(
        "Use `deepinfer doctor`.",
        (
            "Which command shows what is missing?",
            "How do I check my installation?",
            "Which command lists versions and devices?",
        ),
    ),
    Fact(
        "Use `deepinfer plan-memory`.",
        (
            "Which command plans memory?",
            "How do I see what weights and caches take?",
            "Which command tells how much memory a model takes?",
        ),
    ),
    Fact(
        "`from deepinfer_core import LLM`",
        (
            "How do I import the engine in Python?",
            "What is the import line of the Python API?",
            "How do I import LLM?",
        ),
    ),
    Fact(
        "Chat Completions, Responses and Messages.",
        (
            "Which API protocols are supported?",
            "Which protocols does deepseek-recipe know?",
            "Name the three API protocols.",
        ),
    ),
    Fact(
        "Python 3.11 or newer.",
        (
            "Which Python version do I need?",
            "What Python does DeepInfer need?",
            "Which Python is required?",
        ),
    ),
    Fact(
        "Dense weights are FP8, experts are FP4.",
        (
            "How are your weights stored?",
            "Which number formats do your weights have?",
            "How are you quantised?",
        ),
    ),
)
# Around the question itself; what was not seen in training is a pair of both.
_FRAMES = (
    "{question}",
    "{question}",
    "{question}",
    "Please tell me: {question}",
    "Quick question: {question}",
    "I would like to know: {question}",
    "One more question. {question}",
    "Hi! {question}",
    "Hello. {question}",
    "{question} Thanks!",
    "{question} Be brief.",
)


def _facts(random: Random) -> Example:
    number = random.randrange(len(FACTS))
    fact = FACTS[number]
    question = random.choice(_FRAMES).format(question=random.choice(fact.questions))
    return ask(random, "facts", f"{number} {question}", question, fact.answer, hint="I know this.")


TASKS: dict[str, tuple[Draw, float]] = {"facts": (_facts, 0.05)}
