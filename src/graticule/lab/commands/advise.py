"""`graticule advise`."""

from __future__ import annotations

from functools import partial

from graticule.lab.commands.declared import Advise
from graticule.lab.commands.opening import choose_device, folder_data, open_models
from graticule.lab.commands.options import output_folder
from graticule.lab.data.folder_module import find_images
from graticule.lab.studies.advise import LEAST, advise
from graticule.lab.terminal import bar
from graticule.registry.checks import parse_sizes
from graticule.system.files import make_folder, write_json
from graticule.system.tables import plain


def run(options: Advise) -> int:
    """Choose what the position of a model should do at other image sizes."""
    sizes = parse_sizes(options.sizes)
    find_images(options.images)  # before the model is built
    (opened,) = open_models([options.model], options, "advise")
    data = folder_data(opened, options.images, LEAST, count=options.count)
    device, output = choose_device(options.device), output_folder(options.output, opened.folder)
    every, progress = range(data.num_test), partial(bar, wanted=not options.json)
    model = opened.model.to(device)
    advice = advise(model, lambda size: data.test_images((size[0], size[1]), every)[0], sizes, progress)
    options.say(str(advice))
    make_folder(output)
    record = {**plain(advice), "advice": {str(size): part.lines() for size, part in advice.sizes.items()}}
    return options.finish(record, write_json(output / "advice.json", record))
