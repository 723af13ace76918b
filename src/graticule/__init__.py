"""Position encodings for vision backbones: encodings, joinings, backbones, and analyses of position in every layer.

A name is imported when it is first used, so that `import graticule` costs milliseconds. `import graticule.backbones`
registers the models with timm, as `graticule_...`.
"""

from typing import TYPE_CHECKING

from graticule.lazy import lazy_names

if TYPE_CHECKING:
    from graticule.backbones import (
        Backbone,
        create_language_model,
        create_model,
        generate,
        list_language_models,
        list_models,
        register_backbone,
    )
    from graticule.checkpoints import Transfer, load_checkpoint, published_state_dict, transfer
    from graticule.data import Augmentation, DenseAugmentation, register_dataset, register_text
    from graticule.dense import create_detector, create_segmenter
    from graticule.encodings import (
        AbsoluteEncoding,
        BiasEncoding,
        ComputedEncoding,
        PatchBias,
        PositionBuilder,
        RotaryEncoding,
        register_encoding,
    )
    from graticule.factory import build_position, list_decompositions, list_encodings, list_joinings
    from graticule.grid import Crop, Grid
    from graticule.hub import from_pretrained, save_pretrained
    from graticule.joining import Joining, register_joining
    from graticule.layer_position import LayerPosition
    from graticule.metric import Metric
    from graticule.plugins import load_plugin
    from graticule.recipe_registry import register_recipe
    from graticule.resampling import Resampler, register_resampler
    from graticule.specs import Spec
    from graticule.surgery import attach, detach, export, fold, resize, unfold
    from graticule.surgery.convert import convert, to_timm
    from graticule.tasks import DetectionRecipe, Distillation, Mixing, Recipe, SegmentationRecipe, TextRecipe
    from graticule.training import Run, Task, TrainingRecipe, load, register_task, train

__version__ = "0.1.0"

#: Public name -> the module that defines it.
_HOMES = {
    "AbsoluteEncoding": "encodings",
    "Augmentation": "data",
    "Backbone": "backbones",
    "BiasEncoding": "encodings",
    "ComputedEncoding": "encodings",
    "Crop": "grid",
    "DenseAugmentation": "data",
    "DetectionRecipe": "tasks",
    "Distillation": "tasks",
    "Grid": "grid",
    "Joining": "joining",
    "LayerPosition": "layer_position",
    "Metric": "metric",
    "Mixing": "tasks",
    "PatchBias": "encodings",
    "PositionBuilder": "encodings",
    "Recipe": "tasks",
    "Resampler": "resampling",
    "RotaryEncoding": "encodings",
    "Run": "training",
    "SegmentationRecipe": "tasks",
    "Spec": "specs",
    "Task": "training",
    "TextRecipe": "tasks",
    "TrainingRecipe": "training",
    "Transfer": "checkpoints",
    "attach": "surgery",
    "build_position": "factory",
    "convert": "surgery.convert",
    "create_detector": "dense",
    "create_language_model": "backbones",
    "create_model": "backbones",
    "create_segmenter": "dense",
    "detach": "surgery",
    "export": "surgery",
    "fold": "surgery",
    "from_pretrained": "hub",
    "generate": "backbones",
    "list_decompositions": "factory",
    "list_encodings": "factory",
    "list_joinings": "factory",
    "list_language_models": "backbones",
    "list_models": "backbones",
    "load": "training",
    "load_checkpoint": "checkpoints",
    "load_plugin": "plugins",
    "published_state_dict": "checkpoints",
    "register_backbone": "backbones",
    "register_dataset": "data",
    "register_encoding": "encodings",
    "register_joining": "joining",
    "register_recipe": "recipe_registry",
    "register_resampler": "resampling",
    "register_task": "training",
    "register_text": "data",
    "resize": "surgery",
    "save_pretrained": "hub",
    "to_timm": "surgery.convert",
    "train": "training",
    "transfer": "checkpoints",
    "unfold": "surgery",
}

__all__ = [
    "AbsoluteEncoding",
    "Augmentation",
    "Backbone",
    "BiasEncoding",
    "ComputedEncoding",
    "Crop",
    "DenseAugmentation",
    "DetectionRecipe",
    "Distillation",
    "Grid",
    "Joining",
    "LayerPosition",
    "Metric",
    "Mixing",
    "PatchBias",
    "PositionBuilder",
    "Recipe",
    "Resampler",
    "RotaryEncoding",
    "Run",
    "SegmentationRecipe",
    "Spec",
    "Task",
    "TextRecipe",
    "TrainingRecipe",
    "Transfer",
    "attach",
    "build_position",
    "convert",
    "create_detector",
    "create_language_model",
    "create_model",
    "create_segmenter",
    "detach",
    "export",
    "fold",
    "from_pretrained",
    "generate",
    "list_decompositions",
    "list_encodings",
    "list_joinings",
    "list_language_models",
    "list_models",
    "load",
    "load_checkpoint",
    "load_plugin",
    "published_state_dict",
    "register_backbone",
    "register_dataset",
    "register_encoding",
    "register_joining",
    "register_recipe",
    "register_resampler",
    "register_task",
    "register_text",
    "resize",
    "save_pretrained",
    "to_timm",
    "train",
    "transfer",
    "unfold",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
