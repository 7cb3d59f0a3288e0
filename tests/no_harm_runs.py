"""Records of runs of the do-no-harm matrix that are made up."""


def record(
    method,
    seed,
    accuracy,
    *,
    gap=0.0,
    dataset="digits",
    network="narrow_cnn",
    seconds=1.0,
    command="python -m benchmarks.no_harm",
):
    return {
        "dataset": dataset,
        "network": network,
        "method": method,
        "seed": seed,
        "parameters": 1000,
        "test_accuracy": [0.1, accuracy],
        "by_mode": {
            "first_epoch": {
                "training": 0.9,
                "inference": 0.9 - gap,
                "estimated": 0.9 - gap / 2,
            },
            "last_epoch": {"training": 0.9, "inference": 0.9},
        },
        "seconds_per_step": seconds,
        "command": command,
    }


def several(method, accuracies, **options):
    return [record(method, seed, each, **options) for seed, each in enumerate(accuracies)]
