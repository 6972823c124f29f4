# The Python driver, the part about rich values: read when the first of them appears.

import sys

RICH = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_latex_": "text/latex",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_json_": "application/json",
}


def instance_of(value, module, *names):
    """Whether the value is of a library's type, without importing the library."""
    module = sys.modules.get(module)
    kinds = tuple(kind for kind in (getattr(module, name, None) for name in names) if isinstance(kind, type))
    return isinstance(value, kinds)


def add_methods(bundle, value):
    kind = type(value)
    if hasattr(kind, "_repr_mimebundle_"):
        found = value._repr_mimebundle_()
        if isinstance(found, tuple):
            found, metadata = found
            bundle.metadata.update(metadata or {})
        for mime, data in (found or {}).items():
            if mime == "text/plain" and isinstance(data, str) and len(data) > MAX_TEXT:
                bundle.leave_out(mime, len(data), "the text is longer than %d bytes and was cut" % MAX_TEXT)
                data = data[:MAX_TEXT]
            bundle.add(str(mime), data)
    for name, mime in RICH.items():
        # Found by type: an object that answers to any name has no idea of these.
        if mime not in bundle.parts and hasattr(kind, name):
            method = getattr(value, name, None)
            try:
                bundle.add(mime, method() if callable(method) else None)
            except NotImplementedError:
                pass


def add_table(bundle, value):
    pandas = sys.modules["pandas"]
    frame = value if isinstance(value, pandas.DataFrame) else value.to_frame()
    rows, columns = frame.shape
    limits = []
    for name, most in (("display.max_rows", TABLE_ROWS), ("display.max_columns", TABLE_COLUMNS)):
        limits += [name, min(pandas.get_option(name) or most, most)]
    with pandas.option_context(*limits, "display.show_dimensions", "truncate"):
        bundle.add("text/html", frame._repr_html_())
        bundle.add_text(value)
    if rows > TABLE_ROWS or columns > TABLE_COLUMNS:
        bundle.leave_out("text/html", 0, "shows a part of %d rows and %d columns" % (rows, columns))
    part = frame.iloc[: min(JSON_ROWS, max(1, JSON_CELLS // max(1, columns))), :JSON_CELLS]
    try:
        text = part.to_json(orient="split", date_format="iso", default_handler=str)
    except Exception as error:  # a table may hold anything
        return bundle.leave_out("application/json", 0, "cannot be JSON: %s" % error)
    bundle.add("application/json", Json('{"shape":[%d,%d],%s' % (rows, columns, text[1:])))
    if part.shape != frame.shape:
        bundle.leave_out("application/json", 0, "holds %d of %d rows and %d of %d columns" % (
            part.shape[0], rows, part.shape[1], columns))


def too_large(bundle, width, height, advice):
    if width * height <= MAX_PIXELS:
        return False
    reason = "%d x %d pixels are more than the %d megapixels that are drawn; %s"
    bundle.leave_out("image/png", int(width * height * 4), reason % (width, height, MAX_PIXELS // 1_000_000, advice))
    return True


def add_figure(bundle, figure):
    import io

    State.figures.append(figure)
    dpi = sys.modules["matplotlib"].rcParams["savefig.dpi"]
    dpi = figure.dpi if dpi == "figure" else dpi
    width, height = (float(side) * dpi for side in figure.get_size_inches())
    if too_large(bundle, width, height, "make figsize or dpi smaller, or save it to a file with savefig"):
        return
    box = None
    try:  # labels outside of the figure are wanted, an artist a mile away is not
        tight = figure.get_tightbbox()
        if 0 < tight.width * tight.height * dpi * dpi < min(4 * width * height, MAX_PIXELS):
            box = "tight"
    except Exception:  # an old matplotlib, or nothing to measure
        pass
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches=box)
    bundle.add("image/png", file.getvalue())


def add_picture(bundle, picture):
    import io

    if too_large(bundle, *picture.size, "make it smaller with thumbnail() or save it to a file"):
        return
    file = io.BytesIO()
    try:
        picture.save(file, "PNG")
    except (OSError, ValueError):  # a mode that PNG does not have
        file = io.BytesIO()
        picture.convert("RGB").save(file, "PNG")
    bundle.add("image/png", file.getvalue())


def add_rich(bundle, value):
    if instance_of(value, "pandas", "DataFrame", "Series"):
        add_table(bundle, value)
    elif instance_of(value, "matplotlib.figure", "Figure"):
        add_figure(bundle, value)
        bundle.add_text(value)
    elif instance_of(value, "PIL.Image", "Image"):
        add_picture(bundle, value)
        bundle.add_text(value)
    else:
        add_methods(bundle, value)
        if "text/plain" not in bundle.parts:
            bundle.add_text(value)


def show_figures():
    """Shows what pyplot holds open, in order, and closes it."""
    helpers = sys.modules["matplotlib._pylab_helpers"]
    if getpid() != State.pid:
        return
    try:
        for number in sorted(helpers.Gcf.figs):
            figure = helpers.Gcf.figs[number].canvas.figure
            if not any(figure is shown for shown in State.figures):
                display(figure)
    finally:
        helpers.Gcf.destroy_all()
        State.figures = []


def make_display_module(module):
    """What `IPython.display` offers, as far as it is about showing, for images without IPython."""

    def shown_as(name, mime, binary=False):
        def init(self, data=None, filename=None, url=None, **_):
            if url is not None:
                raise ValueError("there is no browser to fetch a url: pass data or filename")
            if filename is None and binary and isinstance(data, str):
                filename = data
            if filename is not None:
                with open(filename, "rb") as file:
                    data = file.read() if binary else file.read().decode()
            self.data = data

        def bundle(self, **_):
            jpeg = binary and bytes(self.data[:2]) == b"\xff\xd8"
            return {"image/jpeg" if jpeg else mime: self.data}

        return type(name, (), {"__init__": init, "_repr_mimebundle_": bundle, "__module__": "IPython.display"})

    module.display = display
    module.clear_output = lambda wait=False: None
    module.Image = shown_as("Image", "image/png", True)
    for name, mime in (
        ("HTML", "text/html"), ("Markdown", "text/markdown"), ("JSON", "application/json"),
        ("SVG", "image/svg+xml"), ("Latex", "text/latex"), ("Pretty", "text/plain"),
    ):
        setattr(module, name, shown_as(name, mime))
