"""The note below a figure's panels, which says what its bars, bands and lines are."""


def note_of(figure):
    """The text of the note; it and the legends stand inside the figure, clear of the panels."""
    figure.canvas.draw()
    (note,) = figure.texts
    place = note.get_window_extent()
    assert figure.bbox.x0 <= place.x0 < place.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= place.y0 < place.y1
    assert place.y1 <= min(part.get_tightbbox().y0 for part in (*figure.axes, *figure.legends))
    for legend in figure.legends:
        place = legend.get_window_extent()
        assert figure.bbox.x0 <= place.x0 < place.x1 <= figure.bbox.x1
        assert max(ax.get_tightbbox().y1 for ax in figure.axes) <= place.y0 < place.y1 <= figure.bbox.y1
    return note.get_text()
