// How wide an element is drawn, and whether it is in sight.

import {useEffect, useLayoutEffect, useRef, useState} from "./html.js";

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

/** Return whether the element of a ref is in sight, for what is read only while somebody can see it. */
export function useInSight(root) {
  const [inSight, setInSight] = useState(false);
  useEffect(() => {
    const see = (entries) => setInSight(entries[entries.length - 1].isIntersecting);
    const watch = new IntersectionObserver(see, {rootMargin: "250px"});
    watch.observe(root.current);
    return () => watch.disconnect();
  }, []);
  return inSight;
}
