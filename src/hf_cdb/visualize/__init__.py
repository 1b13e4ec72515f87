"""Pictures of depth: tokens coloured by the loop they left at, and what a schedule launched.

    from hf_cdb.visualize import depth_html

    output = model.generate(**inputs, cdb=True, return_dict_in_generate=True)
    depth_html(tokenizer, output.sequences, output.exit_depths).save("depths.html")

HTML needs nothing but the package; the figures need matplotlib, `pip install 'hf-cdb[bench]'`.
"""

from .figures import depth_figure, schedule_figure, schedule_grid
from .html import DepthHTML, depth_html

__all__ = ["DepthHTML", "depth_figure", "depth_html", "schedule_figure", "schedule_grid"]
