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


# Groups of commands, outer ones first: what the words before a command's own are, and what they say of themselves.
GROUPS = {
    "job": "Run jobs on a cluster or, as a rehearsal, on this machine.",
    "job config": "The defaults of job commands.",
    "cluster": "Make and delete GKE clusters with TPU slices.",
    "vm": "Make and delete TPU virtual machines.",
}

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
        "Say what a run would need and cost on TPUs or GPUs, without one.",
        "Compiles the very programs of train-rl for the devices in question and shows memory, exchange between chips, "
        "and an estimate of time and price; the extras tpu and cuda bring the compilers.",
        (
            "burnish plan recipes/llama3.1-8b-v6e-8.yaml topology=v6e-8",
            "burnish plan recipes/gemma4-26b-v6e-32.yaml topology=v6e-32 price_per_chip_hour=2.7 json_file=plan.json",
            "burnish plan recipes/llama3.1-8b-h100-8.yaml topology=h100-8",
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
    Command(
        "job config set",
        "Set a default of the job commands.",
        "Kept in burnish/job.json in your configuration directory (XDG_CONFIG_HOME, or ~/.config).",
        ("burnish job config set project my-project", "burnish job config set backend local"),
        "burnish.launch.commands:config_set",
        positional=("key", "value"),
    ),
    Command(
        "job config list",
        "Show the defaults of the job commands.",
        "What is not set is shown as empty.",
        ("burnish job config list",),
        "burnish.launch.commands:config_list",
    ),
    Command(
        "job submit",
        "Start a job.",
        "The command runs on every host of every slice, or once with --pathways. What is wrong with a job is said "
        "before anything is sent or started.",
        (
            "burnish job submit --name=train --compute-type=ct6e-standard-4t --topology=4x8 --image=<image> "
            "--command='burnish train-rl …' --await-job-completion",
            "burnish job submit --name=train --backend=local --compute-type=v6e-32 --command='burnish train-rl …'",
            "burnish job submit job.yaml --name=again --dry-run",
        ),
        "burnish.launch.commands:submit",
    ),
    Command(
        "job list",
        "Show the jobs and their states.",
        "Pending, Suspended (waiting for its queue), Running, Succeeded, Failed or Cancelled.",
        ("burnish job list", "burnish job list --status=Running --name-contains=gemma --output=json"),
        "burnish.launch.commands:list_jobs",
    ),
    Command(
        "job logs",
        "Show what a job has printed.",
        "Lines begin with their host, but with main_only, which shows one host.",
        ("burnish job logs train", "burnish job logs train --main-only -f"),
        "burnish.launch.commands:logs",
        positional=("name",),
    ),
    Command(
        "job describe",
        "Show what a job is, how its hosts are and what happened to it.",
        "Secrets are named, their values are not shown.",
        ("burnish job describe train", "burnish job describe train --output=json"),
        "burnish.launch.commands:describe",
        positional=("name",),
    ),
    Command(
        "job inspect",
        "Show all that helps to find out why a job does not do what it should.",
        "More than describe: the objects and machines around the job, and the ends of its logs.",
        ("burnish job inspect train", "burnish job inspect train --output=json > train.json"),
        "burnish.launch.commands:inspect",
        positional=("name",),
    ),
    Command(
        "job cancel",
        "End a job and free its name.",
        "A running job's processes get SIGTERM, the grace period, and SIGKILL.",
        ("burnish job cancel train",),
        "burnish.launch.commands:cancel",
        positional=("name",),
    ),
    Command(
        "cluster create",
        "Make a GKE cluster with one node pool per TPU slice, JobSet, Kueue and a queue.",
        "Says what it will make and asks. What is there already is checked and kept, so the same command goes on "
        "where an earlier one failed or was interrupted.",
        (
            "burnish cluster create rl --project=my-project --location=us-east5-b --compute-type=ct6e-standard-4t "
            "--topology=4x8 --reservation=my-reservation --bucket=my-bucket --authorized-cidr=203.0.113.7/32",
            "burnish cluster create rl --compute-type=v6e-32 --spot --dry-run",
        ),
        "burnish.launch.cloud.commands:cluster_create",
        positional=("name",),
    ),
    Command(
        "cluster describe",
        "Show a cluster: its state, its node pools, what is under way, JobSet and Kueue.",
        "Reads only.",
        ("burnish cluster describe rl", "burnish cluster describe rl --output=json"),
        "burnish.launch.cloud.commands:cluster_describe",
        positional=("name",),
    ),
    Command(
        "cluster delete",
        "Delete a cluster with its node pools and service account, and a bucket where you name it.",
        "Says what it will delete and asks; clusters that burnish did not make are left alone.",
        ("burnish cluster delete rl", "burnish cluster delete rl --delete-bucket=my-bucket --yes"),
        "burnish.launch.cloud.commands:cluster_delete",
        positional=("name",),
    ),
    Command(
        "vm create",
        "Make a TPU virtual machine and wait until it runs.",
        "Says what it will make and asks; a machine that is there already is checked and kept.",
        (
            "burnish vm create rl-vm --project=my-project --zone=us-east5-b --reservation=my-reservation",
            "burnish vm create rl-vm --machine-type=ct6e-standard-1t --spot --dry-run",
        ),
        "burnish.launch.cloud.commands:vm_create",
        positional=("name",),
    ),
    Command(
        "vm ssh-command",
        "Show how to get onto a TPU virtual machine, and the environment to set there.",
        "The environment tells the TPU runtime that the machine is a slice by itself.",
        ("burnish vm ssh-command rl-vm", "burnish vm ssh-command rl-vm --output=json"),
        "burnish.launch.cloud.commands:vm_ssh_command",
        positional=("name",),
    ),
    Command(
        "vm delete",
        "Delete a TPU virtual machine with its boot disk.",
        "Says what it will delete and asks.",
        ("burnish vm delete rl-vm",),
        "burnish.launch.cloud.commands:vm_delete",
        positional=("name",),
    ),
)
