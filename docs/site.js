// A search for --max-restarts is for these words; the search would leave out pages that have them.
const send = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (typeof message?.data === "string") message.data = message.data.replace(/(^|\s)-+(?=\w)/g, "$1");
  return send.call(this, message, ...rest);
};
