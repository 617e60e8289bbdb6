// Dialogs: one at a time, over everything, closed by Escape, its button or a click beside it.

import {html, render, useEffect, useElement, useId} from "../lib/html.js";
import {ClosableHead} from "./states.js";

function Dialog({title, id, class: name, onClose, children}) {
  const dialog = useElement();
  const heading = useId();
  useEffect(() => {
    if (!dialog.current.open) dialog.current.showModal();
  }, []);
  const close = () => dialog.current.close();
  const outside = (event) => {
    if (event.target === dialog.current) close();
  };
  const attributes = {id, class: name, "aria-labelledby": heading, onClose, onClick: outside};
  return html`<dialog ref=${dialog} ...${attributes}>
    <${ClosableHead} title=${title} id=${heading} onClose=${close} />${children}
  </dialog>`;
}

// Open a dialog from an event: outside of any component, with the given children.
export function openDialog(props, children) {
  const root = document.createElement("div");
  const onClose = () => {
    render(null, root);
    root.remove();
  };
  document.body.append(root);
  render(html`<${Dialog} ...${props} onClose=${onClose}>${children}<//>`, root);
}
