"""The picture of a ladder: loss over tokens, both logarithmic. Each rung has its points and the
law's curve, the target a dashed curve with what was predicted and measured."""
from pathlib import Path

import numpy as np

from tools.loss_picture import COLORS, rising, short
from tools.matplotlib_svg import picture
from tools.scaling_law import Law


def draw(found: dict, file: Path) -> None:
    """Raises ValueError without matplotlib."""
    from matplotlib.ticker import MaxNLocator, NullLocator
    law = Law(**found["law"])
    target, prediction = found["target"], found["prediction"]
    rows = found["points"]
    sizes = sorted({(row["N"], row["width"]) for row in rows})
    times = target["N"] / sizes[-1][0]
    title = f"A ladder of {len(sizes)} sizes predicts one {times:.1f} times larger"
    with picture(file, title, 4.5) as figure:
        panel = figure.subplots()
        tokens = np.geomspace(min(row["D"] for row in rows), target["D"], 40)
        for (N, width), color in zip(sizes, rising(len(sizes))):
            own = [row for row in rows if row["N"] == N]
            panel.plot(tokens, law(N, tokens), color=color, linewidth=1.5,
                       label=f"width {width}, N {short(N)}")
            panel.plot([row["D"] for row in own], [row["loss"] for row in own], "o", color=color,
                       markersize=5)
        color = COLORS[1]
        label = f"target, width {target['width']}, N {short(target['N'])}"
        panel.plot(tokens, law(target["N"], tokens), "--", color=color, linewidth=1.5, label=label)
        panel.vlines(target["D"], prediction["low"], prediction["high"], color=color, linewidth=5,
                     alpha=0.4)
        panel.plot(target["D"], prediction["loss"], "o", color=color, fillstyle="none",
                   label=f"predicted {prediction['loss']:.3f}")
        if found["measured"] is not None:
            panel.plot(target["D"], found["measured"], "o", color=color,
                       label=f"measured {found['measured']:.3f}")
        panel.set(xscale="log", yscale="log", xlabel="tokens read", title=title,
                  ylabel="validation loss, nats per token")
        panel.xaxis.set(major_formatter=lambda count, _: short(count), minor_locator=NullLocator(),
                        major_locator=MaxNLocator(6))
        panel.yaxis.set(major_locator=MaxNLocator(7), minor_locator=NullLocator(),
                        major_formatter=lambda loss, _: f"{loss:g}")
        panel.grid(alpha=0.25)
        figure.legend(loc="outside lower left", frameon=False, ncols=2)
