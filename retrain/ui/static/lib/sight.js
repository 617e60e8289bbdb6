// Whether an element is in sight, for what is read only while somebody can see it.

import {useEffect, useState} from "./html.js";

const MARGIN = "250px";

export function useInSight(root) {
  const [inSight, setInSight] = useState(false);
  useEffect(() => {
    const watch = new IntersectionObserver((entries) => setInSight(entries[entries.length - 1].isIntersecting), {
      rootMargin: MARGIN,
    });
    if (root.current) watch.observe(root.current);
    return () => watch.disconnect();
  }, []);
  return inSight;
}
