"""Jobs as anybody could ask for them: a strategy over the flags of `burnish job submit`."""

from hypothesis import strategies as st

from burnish.launch.job import JobSpec, Mount, MountKind, PathwaysSpec

NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
OBJECT_NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
VARIABLES = st.from_regex(r"X[A-Z0-9_]{0,8}", fullmatch=True)
# Values of secrets are made of q and z, which no other text has.
SECRETS = st.from_regex(r"S_[A-Z0-9_]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0qz"), max_size=30)
MACHINES = st.sampled_from(
    [
        ("ct6e-standard-4t", "4x8"),
        ("ct6e-standard-4t", "2x2"),
        ("ct6e-standard-8t", "2x4"),
        ("ct6e-standard-1t", "1x1"),
        ("v6e-256", None),
        ("v5litepod-16", None),
        ("ct5p-hightpu-4t", "4x4x4"),
        ("ct4p-hightpu-4t", "2x2x2"),
        ("e2-standard-8", None),
    ]
)


@st.composite
def mounts(draw: st.DrawFn) -> tuple[Mount, ...]:
    kinds = st.sampled_from(list(MountKind))
    made = []
    for index, kind in enumerate(draw(st.lists(kinds, max_size=3))):
        sources = {
            MountKind.BUCKET: draw(st.sampled_from(["gs://bucket", "gs://bucket/", "gs://bucket/some/place/"])),
            MountKind.HOST: "/var/data",
            MountKind.CLAIM: draw(OBJECT_NAMES),
        }
        path = (
            draw(st.sampled_from([f"/data/{index}", f"/mnt-{index}"]))
            if index
            else draw(st.sampled_from(["/data", "/dev/shm"]))
        )
        made.append(Mount(kind, sources[kind], path, draw(st.booleans())))
    return tuple(made)


@st.composite
def pathways(draw: st.DrawFn, headless: bool) -> PathwaysSpec:
    environment = st.dictionaries(VARIABLES, TEXTS, max_size=2)
    arguments = st.lists(st.sampled_from(["--flag=1", "--address=$(PATHWAYS_HEAD):1", "--x"]), max_size=2).map(tuple)
    return PathwaysSpec(
        gcs_location="gs://bucket/pathways/",
        proxy_args=draw(arguments),
        server_args=draw(arguments),
        worker_args=draw(arguments),
        proxy_env=draw(environment),
        server_env=draw(environment),
        worker_env=draw(environment),
        head_node_pool=draw(st.none() | NAMES),
        headless=headless,
        proxy_cpu=draw(st.sampled_from(["16", "2.5", "500m"])),
        server_memory=draw(st.sampled_from(["32Gi", "900Mi"])),
    )


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    compute_type, topology = draw(MACHINES)
    is_tpu = not compute_type.startswith("e2")
    with_pathways = is_tpu and draw(st.booleans())
    headless = with_pathways and draw(st.booleans())
    restarts = draw(st.integers(0, 100))
    codes = draw(st.lists(st.integers(1, 255), max_size=4, unique=True)) if restarts else []
    return JobSpec(
        name=draw(NAMES),
        command="" if headless else draw(TEXTS.filter(str.strip)),
        compute_type=compute_type,
        topology=topology,
        num_slices=draw(st.integers(1, 4)) if is_tpu else 1,
        image=draw(st.sampled_from(["image", "europe-docker.pkg.dev/p/r/image:0.2@sha256:" + "0" * 64])),
        env={} if headless else draw(st.dictionaries(VARIABLES, TEXTS, max_size=3)),
        secret_env=draw(st.dictionaries(SECRETS, st.text("qz", min_size=8, max_size=12), max_size=2)),
        mounts=() if headless else draw(mounts()),
        queue=draw(st.none() | OBJECT_NAMES),
        priority=draw(st.none() | OBJECT_NAMES),
        restarts=restarts,
        restart_on_exit_codes=tuple(codes),
        ttl_seconds=draw(st.integers(0, 10**6)),
        grace_seconds=draw(st.integers(0, 3600)),
        timeout_seconds=draw(st.none() | st.integers(1, 10**6)),
        node_constraints=draw(st.dictionaries(st.sampled_from(["pool", "cloud.google.com/x"]), OBJECT_NAMES)),
        image_pull_secret=draw(st.none() | OBJECT_NAMES),
        service_account=draw(st.none() | OBJECT_NAMES),
        verbose=draw(st.booleans()),
        pathways=draw(pathways(headless)) if with_pathways else None,
    )
