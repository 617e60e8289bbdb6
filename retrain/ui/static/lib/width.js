// How wide an element is drawn, for pictures that are laid out in pixels.

import {useLayoutEffect, useRef, useState} from "./html.js";

/** Return a ref for an element, and its width in pixels, 0 before it is drawn. @returns {[{current: any}, number]} */
export function useWidth() {
  const element = useRef(/** @type {HTMLElement | null} */ (null));
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    if (!element.current) return;
    const {current} = element;
    const measure = () => setWidth(current.clientWidth);
    const watch = new ResizeObserver(measure);
    measure();
    watch.observe(current);
    return () => watch.disconnect();
  }, []);
  return [element, width];
}
