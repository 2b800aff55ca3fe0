"""lm-evaluation-harness against a gateway and on the same checkpoint without it.

``python lm_eval_client.py make FAMILY FOLDER TOKENIZER`` writes a random checkpoint with a task of
multiple choice, and ``python lm_eval_client.py compare FOLDER URL MODEL`` compares the scores.
"""

import json
import random
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import lm_eval
import torch
import transformers
from lm_eval.tasks import TaskManager

SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 16, "head_dim": 12},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
}
TEXT = "the quiet fox saw a house by sea and rain in Paris or Rome while nobody read books"
WORDS = TEXT.split()
QUESTIONS, CHOICES = 12, 4
TOLERANCE = 1e-3  # of sums over the tokens of a choice, which float32 rounds in another order
TASK = """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


def make(family: str, folder: Path, source: Path) -> None:
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # far apart, so that choices differ
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    draw, lines = random.Random(family), []
    for number in range(QUESTIONS):
        question = " ".join(draw.choices(WORDS, k=draw.randrange(2, 60)))
        ids = tokenizer(question, return_tensors="pt")
        found = model.generate(**ids, max_new_tokens=1, do_sample=False)
        choices = [" " + " ".join(draw.choices(WORDS, k=draw.randrange(1, 6))) for _ in range(3)]
        choices.insert(number % CHOICES, tokenizer.decode(found[0][-1:]))  # the greedy one
        lines.append(json.dumps({"question": question, "choices": choices, "gold": number % 4}))
    (folder / "task").mkdir()
    (folder / "task" / "test.jsonl").write_text("\n".join(lines))
    (folder / "task" / "choices.yaml").write_text(TASK % (folder / "task" / "test.jsonl"))


def scores(folder: Path, backend: str, **arguments: object) -> tuple[dict, list]:
    """Return the metrics of the task, and by question the score of each choice."""
    found = lm_eval.simple_evaluate(
        model=backend,
        model_args={"pretrained" if backend == "hf" else "tokenizer": str(folder), **arguments},
        tasks=["choices"],
        task_manager=TaskManager(include_path=str(folder / "task"), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["choices"], key=lambda one: one["doc_id"])
    metrics = found["results"]["choices"]
    return metrics, [one["filtered_resps"] for one in samples]


def compare(folder: Path, url: str, model: str) -> None:
    wanted, own = scores(folder, "hf", dtype="float32", device="cpu")
    address = {"base_url": f"{url}/completions", "model": model, "num_concurrent": 2}
    found, served = scores(folder, "local-completions", **address)
    pairs = [
        pair for one, two in zip(own, served, strict=True) for pair in zip(one, two, strict=True)
    ]
    assert len(pairs) == QUESTIONS * CHOICES
    worst = max(abs(one[0] - two[0]) for one, two in pairs)
    assert worst < TOLERANCE, worst
    assert [one[1] for one, _ in pairs] == [two[1] for _, two in pairs]
    assert any(one[1] for one, _ in pairs) and not all(one[1] for one, _ in pairs)
    for name in ("acc,none", "acc_norm,none"):
        assert found[name] == wanted[name], (name, found, wanted)
    print(f"acc {found['acc,none']}, acc_norm {found['acc_norm,none']}, largest gap {worst:.1e}")
    print(f"lm-eval {version('lm_eval')}: ok")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        compare(Path(sys.argv[2]), *sys.argv[3:])
