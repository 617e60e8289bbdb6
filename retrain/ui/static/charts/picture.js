// A chart of lines as a picture: its canvas as it is drawn, below its title and its legend.

import {DASHES, SHAPES, css, dashOf, ink, shapeOf} from "../colours.js";

const FONT = "system-ui, sans-serif";
const [LEFT, ROW, SWATCH] = [10, 18, 28];

// Return the picture of a chart of uPlot; of many `lines` the legend names their groups.
export function pictureOf(chart, title, lines) {
  const named = lines.filter((line) => line.kind !== "thin");
  const nameOf = (line) => (named.length > 6 && line.group) || line.name;
  const scale = devicePixelRatio || 1;
  const drawn = chart.ctx.canvas;
  const width = drawn.width / scale;
  const picture = document.createElement("canvas");
  const context = /** @type {CanvasRenderingContext2D} */ (picture.getContext("2d"));
  context.font = `12px ${FONT}`;
  let [x, y] = [LEFT, 44];
  const entries = [...new Map(named.map((line) => [nameOf(line), line.index]))].map(([name, index]) => {
    const room = SWATCH + context.measureText(name).width + 12;
    if (x > LEFT && x + room > width) [x, y] = [LEFT, y + ROW];
    x += room;
    return {name, index, x: x - room, y};
  });
  Object.assign(picture, {width: drawn.width, height: drawn.height + (y + 12) * scale});
  context.fillStyle = css("--raised");
  context.fillRect(0, 0, picture.width, picture.height);
  context.drawImage(drawn, 0, (y + 12) * scale);
  context.scale(scale, scale);
  context.fillStyle = css("--ink");
  context.font = `600 14px ${FONT}`;
  context.fillText(title, LEFT, 20);
  context.font = `12px ${FONT}`;
  for (const entry of entries) {
    context.fillStyle = css("--ink");
    context.fillText(entry.name, entry.x + SWATCH, entry.y);
    context.strokeStyle = context.fillStyle = ink(entry.index);
    context.lineWidth = 2;
    context.setLineDash(DASHES[dashOf(entry.index)]);
    context.stroke(new Path2D(`M${entry.x} ${entry.y - 4}h22`));
    context.fill(new Path2D(SHAPES[shapeOf(entry.index)](entry.x + 11, entry.y - 4, 3.4)));
  }
  return picture;
}
