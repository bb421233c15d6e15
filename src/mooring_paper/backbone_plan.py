"""The backbones that a reproduction pre-trains before its targets run."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mooring.errors import MooringError, unknown
from mooring_lab.streams.stream import Stream
from mooring_lab.study.pretraining import RECIPES, Note, Pretraining, Report, pretrain_missing, settings_by_recipe
from mooring_lab.study.study import check_device
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import Scale
from mooring_paper.targets import TARGETS, Target

RANDOM_START = "none"
"""The name of the recipe that pre-trains nothing."""


@dataclass(frozen=True)
class BackbonePlan:
    """The settings of the backbones to pre-train.

    Attributes:
        backbones: those that the seeds of a network start from, by network.
        levels: those of the target `fig-backbone`.
    """

    backbones: Mapping[str, Pretraining]
    levels: Sequence[Pretraining]

    def __bool__(self) -> bool:
        return bool(self.backbones or self.levels)

    def pretrain(
        self,
        stream: Stream,
        context: PaperContext,
        folder: Path,
        *,
        report: Report | None = None,
        note: Note | None = None,
    ) -> None:
        """Pre-train what a folder does not have yet, and let the context start from the files.

        Args:
            stream: the images.
            context: names device and dtype, and receives the backbones.
            folder: where the files are and where new ones are written.
            report: called with what is trained, the number of finished steps and that of all steps.
            note: called with what a user should know.
        """
        study, dtype = context.study, context.dtype(context.scale.regimes[0])
        device = check_device(study.device, deterministic=study.deterministic)
        plans = [replace(settings, dtype=dtype) for settings in (*self.backbones.values(), *self.levels)]
        files = pretrain_missing(stream, plans, folder, device=device, report=report, note=note)
        for network, paths in zip(self.backbones, files, strict=False):
            context.set_backbones(network, paths)
        if self.levels:
            context.set_levels([path for paths in files[len(self.backbones) :] for path in paths])


def plan_backbones(
    targets: Sequence[Target],
    scale: Scale,
    recipe: str,
    *,
    given: Collection[str] = (),
    second_seeds: int | None = None,
) -> BackbonePlan:
    """Return what to pre-train for targets; refuse if it is needed and there are no images for it.

    Args:
        targets: the targets; those whose runs they read count too.
        scale: the networks, the seeds and the images.
        recipe: the name of a recipe, or "none" to pre-train nothing.
        given: the networks whose backbones are given.
        second_seeds: how many backbones the second network has; one for each seed if None.

    Example:
        >>> from mooring_paper.context.scale import PAPER
        >>> from mooring_paper.targets import select_targets
        >>> plan = plan_backbones(select_targets(["resnet", "fig-backbone"]), PAPER, "paper", second_seeds=2)
        >>> [settings.description for settings in plan.backbones.values()]
        ['cnn6 (paper, 60 epochs, seeds 0 to 4)', 'resnet18-third (paper, 60 epochs, seeds 0 to 1)']
        >>> [settings.epochs for settings in plan.levels]
        [1, 2, 5, 12, 60, 5, 12, 30]
    """
    if recipe not in (*RECIPES, RANDOM_START):
        raise unknown("recipe", recipe, (*RECIPES, RANDOM_START))
    if recipe == RANDOM_START:
        return BackbonePlan({}, [])
    names = dict.fromkeys(name for target in targets for name in (*target.needs, target.name))
    networks = dict.fromkeys(getattr(scale, field) for name in names for field in TARGETS[name].networks)
    if not scale.code_network or scale.pretraining is None:
        networks.pop(scale.code_network, None)  # its tables are left out
    seeds = dict.fromkeys((scale.second_network, scale.code_network), second_seeds or scale.seeds)
    seeds[scale.network] = scale.seeds
    missing = [network for network in networks if network not in given]
    if missing and scale.pretraining is None:
        options = ["--init" if network == scale.network else "--other-init" for network in missing]
        raise MooringError(
            f"the folder of --data has no cifar10 to pre-train {' and '.join(missing)} on: put it there, give "
            f"backbones with {' and '.join(options)}, or say --recipe none for random weights"
        )
    backbones = {network: settings_by_recipe(recipe, network=network, seeds=seeds[network]) for network in missing}
    wanted = scale.levels if "fig-backbone" in names and scale.pretraining is not None else ()
    levels = [settings_by_recipe(name, network=scale.network, epochs=epochs) for name, epochs in wanted]
    return BackbonePlan(backbones, levels)


def backbone_folder(study: Path) -> Path:
    """Return the folder of the backbones that are pre-trained for a study, next to its file.

    Example:
        >>> backbone_folder(Path("results/paper.sqlite")).as_posix()
        'results/paper-backbones'
    """
    return study.with_name(f"{study.stem}-backbones")
