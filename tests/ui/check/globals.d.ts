// What classic scripts define before the page's modules run.
declare var uPlot: any;
declare var RETRAIN_COPY: any;
declare var retrainAnswers: (answers: Record<string, unknown>) => void;
