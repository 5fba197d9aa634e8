"""The commands of `burnish`: what each is called, what it says of itself, and which function it runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """What a command is called, what it says of itself and what it runs. Its options are those that
    config.schema.COMMANDS has under its name."""

    name: str
    summary: str
    explanation: str
    examples: tuple[str, ...]
    function: str  # "module:function", taking the config
    alias: str = ""
    positional: tuple[str, ...] = ()  # options that words without a name fill


COMMANDS = (
    Command(
        "demo",
        "Train the embedded model in a few minutes and show what came of it.",
        "The whole way once, without any download: import, evaluation, GRPO on generated word problems, evaluation, "
        "verified export to a Hugging Face directory.",
        ("burnish demo", "burnish demo base_output_directory=/tmp/burnish"),
        "burnish.rl.demo:demo",
    ),
    Command(
        "train-rl",
        "Train a model with GRPO on verifiable rewards.",
        "Evaluates, trains on groups of scored completions, evaluates again; everything is written to "
        "base_output_directory/run_name.",
        (
            "burnish train-rl load_parameters_path=meta-llama/Llama-3.2-1B-Instruct num_batches=50",
            "burnish train-rl recipes/smollm2-gsm8k.yaml rl.num_generations=8 learning_rate=2e-6",
            "burnish train-rl recipes/smollm2-gsm8k.yaml run_name=monday resume=true",
        ),
        "burnish.rl.train:train",
        alias="train_rl",
    ),
    Command(
        "plan",
        "Say what a run would need and cost on a slice of TPUs, without one.",
        "Compiles the very programs of train-rl for the devices in question and shows memory, exchange between chips, "
        "and an estimate of time and price; the extra tpu brings the compiler.",
        (
            "burnish plan recipes/llama3.1-8b-v6e-8.yaml topology=v6e-8",
            "burnish plan recipes/gemma4-26b-v6e-32.yaml topology=v6e-32 price_per_chip_hour=2.7 json_file=plan.json",
            "burnish plan model_name=llama3.1-8b-Instruct topology=v6e:2x2 batch_size=16 rl.num_generations=8 "
            "search=true",
        ),
        "burnish.plan.command:plan",
    ),
    Command(
        "sft",
        "Fine-tune a model on questions and answers.",
        "Cross-entropy on the answers only; prompts are read but not trained on.",
        (
            "burnish sft load_parameters_path=<checkpoint> dataset_name=json hf_train_files=train.jsonl",
            "burnish sft load_parameters_path=<directory> random_init=true dataset_name=builtin",
        ),
        "burnish.rl.sft:sft",
    ),
    Command(
        "evaluate",
        "Measure a model on a data set: pass@K, maj@K or pass_at_1.",
        "Samples completions for the evaluation split and scores them as training does.",
        (
            "burnish evaluate load_parameters_path=<checkpoint> num_test_batches=-1",
            "burnish evaluate load_parameters_path=<checkpoint> eval_mode=maj num_eval_passes=8 "
            "eval_sampling_strategy=standard",
        ),
        "burnish.rl.evaluate_command:evaluate",
    ),
    Command(
        "generate",
        "Complete prompts.",
        "Prompts come from the command line or a file; completions go to the terminal or a JSONL file.",
        (
            'burnish generate load_parameters_path=<checkpoint> prompt="What is 7 times 8?"',
            "burnish generate load_parameters_path=<checkpoint> prompts_file=in.txt output_file=out.jsonl",
        ),
        "burnish.rl.generate_command:generate",
    ),
    Command(
        "chat",
        "Talk to a model in the terminal.",
        "The conversation goes through the tokenizer's chat template; an empty line or Ctrl-D ends it.",
        (
            "burnish chat load_parameters_path=<checkpoint>",
            "burnish chat load_parameters_path=<checkpoint> decode_sampling_temperature=0",
        ),
        "burnish.rl.generate_command:chat",
    ),
    Command(
        "to-huggingface",
        "Export a checkpoint to a Hugging Face directory and verify it.",
        "Keeps the source's own config, tokenizer and generation settings; written whole or not at all.",
        (
            "burnish to-huggingface load_parameters_path=runs/monday/checkpoints/actor/50/model_params "
            "base_output_directory=exported",
            "burnish to-huggingface load_parameters_path=<checkpoint> base_output_directory=exported "
            "weight_dtype=bfloat16",
        ),
        "burnish.checkpoints.export_command:to_huggingface",
        alias="to_huggingface",
    ),
    Command(
        "to-maxtext",
        "Convert a Hugging Face checkpoint to a MaxText checkpoint.",
        "Writes base_output_directory/0/items, streamed: memory does not grow with the model.",
        (
            "burnish to-maxtext model_name=llama3.1-8b-Instruct base_output_directory=mt-format scan_layers=True",
            "burnish to-maxtext --hf_model_path=google/gemma-4-26b-a4b-it base_output_directory=mt-format "
            "scan_layers=False checkpoint_storage_use_zarr3=0 checkpoint_storage_use_ocdbt=0",
        ),
        "burnish.checkpoints.convert_commands:to_maxtext",
        alias="to_maxtext",
    ),
    Command(
        "convert",
        "Convert any checkpoint to any other kind.",
        "Recognises what the source is: a Hugging Face directory or hub id, a MaxText checkpoint (scanned or "
        "not, of to_maxtext or of RL), a training checkpoint.",
        (
            "burnish convert meta-llama/Llama-3.1-8B-Instruct mt-format --to maxtext",
            "burnish convert mt-run/checkpoints/actor/50/model_params hf-trained --to hf "
            "hf_model_path=meta-llama/Llama-3.1-8B-Instruct",
        ),
        "burnish.checkpoints.convert_commands:convert",
        positional=("source", "destination"),
    ),
    Command(
        "inspect",
        "Show what a checkpoint holds: its kind, tree, shapes, types, sizes, config and origin.",
        "Reads headers and metadata only.",
        ("burnish inspect mt-format", "burnish inspect runs/monday/checkpoints/actor/50"),
        "burnish.checkpoints.inspect_command:inspect",
        positional=("path",),
    ),
    Command(
        "compare",
        "Say where two checkpoints differ.",
        "Compares tensor by tensor, whatever the kinds; ends with status 1 where they differ.",
        ("burnish compare exported meta-llama/Llama-3.1-8B-Instruct", "burnish compare mt-format exported"),
        "burnish.checkpoints.compare_command:compare",
        positional=("first", "second"),
    ),
)
