"""Recipes of ``executorch.export`` for optimised models. Needs executorch.

Importing this makes them known to ExecuTorch, as importing ``executorch.backends.xnnpack.recipes`` does XNNPACK's;
nothing else of torch_pi2 imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.utils.configs import get_xnnpack_edge_compile_config
from executorch.export import BackendRecipeProvider, ExportRecipe, LoweringRecipe, RecipeType, recipe_registry
from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.errors import ConfigError
from torch_pi2.export.partitioner import Pi2Partitioner

_BACKEND = "pi2"
_OPTIONS = ("model", "store")


class Pi2RecipeType(RecipeType):
    """How an optimised model is lowered. All take ``model`` and ``store``, as :class:`Pi2Partitioner` does."""

    #: Feed-forward layers go to ``Pi2Backend``; the rest to the recipes that it is combined with.
    FFN = "pi2_ffn"
    #: Feed-forward layers go to ``Pi2Backend``, the rest to XNNPACK.
    FFN_XNNPACK = "pi2_ffn_xnnpack"

    @classmethod
    def get_backend_name(cls) -> str:
        """The name by which ExecuTorch knows :class:`Pi2RecipeProvider`."""
        return _BACKEND


class Pi2RecipeProvider(BackendRecipeProvider):
    """Makes :class:`Pi2RecipeType` recipes::

    from torch_pi2.export.recipe import Pi2RecipeType

    recipe = ExportRecipe.get_recipe(Pi2RecipeType.FFN_XNNPACK, model=model, store="out/model.pi2")
    export(model, [(x,)], recipe).save_to_pte("out/model.pte")
    """

    @property
    def backend_name(self) -> str:
        """``pi2``."""
        return _BACKEND

    def get_supported_recipes(self) -> Sequence[RecipeType]:
        """All of :class:`Pi2RecipeType`."""
        return list(Pi2RecipeType)

    def create_recipe(self, recipe_type: RecipeType, **kwargs: Any) -> ExportRecipe | None:
        """The recipe; None if it is no :class:`Pi2RecipeType`. The store is written at once.

        Args:
            kwargs: ``model``, that :func:`torch_pi2.optimize` or :func:`torch_pi2.load` gave, and which, or a module
                around it, is then exported; ``store``, the file to write.

        Raises:
            ConfigError: an option that is missing, unknown or of another type; a dense model.
                UnsupportedModelError, ArtifactError: see :class:`Pi2Partitioner`.
        """
        if not isinstance(recipe_type, Pi2RecipeType):
            return None
        missing, unknown = [name for name in _OPTIONS if name not in kwargs], sorted({*kwargs} - {*_OPTIONS})
        if missing or unknown:
            raise ConfigError(
                f"recipe {recipe_type.value}",
                expected="the options model and store",
                found=f"no {' and no '.join(missing)}" if missing else f"the option {unknown[0]}",
                fix=f'ExportRecipe.get_recipe({recipe_type}, model=model, store="model.pi2").',
            )
        return _recipe(recipe_type, **kwargs)


@checked
def _recipe(recipe_type: Pi2RecipeType, model: nn.Module, store: str | Path) -> ExportRecipe:
    rest = [XnnpackPartitioner()] if recipe_type is Pi2RecipeType.FFN_XNNPACK else []
    lowering = LoweringRecipe(
        partitioners=[Pi2Partitioner(model, store), *rest],
        edge_compile_config=get_xnnpack_edge_compile_config(),  # to be combined they must agree: as XNNPACK's recipes
    )
    return ExportRecipe(name=recipe_type.value, lowering_recipe=lowering)


recipe_registry.register_backend_recipe_provider(Pi2RecipeProvider())
